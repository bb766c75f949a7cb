"""The place and the remedy of a mistake in text that is not YAML.

Scanners notice a mistake late, and describe it in terms of tokens. So a few lines before the scanner's mark are
searched first. The messages of PyYAML's two loaders differ, the lines do not.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

_INDICATORS = {"*": "an alias", "&": "an anchor", "!": "a tag", "[": "a list", "{": "a mapping"}
_VALUE = re.compile(r"\s*(?:- +)*(?:[^\s:\"'\[{]+:\s+)?(\S)")  # first character of a line's value
# A line that begins with a word is a key, and a word in a list may be one ...
_WORD = re.compile("\\s*(?:- +(?=[\\w-]+ *[:=\uff1a])|-)?[A-Za-z_]")
_KEY = re.compile(r"\s*(?:- +)*[A-Za-z_][^:#=]*:(?:[ \t]|$)")  # ... with a colon and a blank
_OPENED = re.compile(r"(?:[:,\[{]|^\s*-)\s*([\"'])")


def mark_at(line: int, column: int) -> yaml.Mark:
    return yaml.Mark("", 0, line, column, None, 0)


def indicator_hint(char: str) -> str:
    return f'`{char}` starts {_INDICATORS[char]} in YAML: quote patterns, e.g. params: "*.weight"'


def syntax_error(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[str, str, yaml.Mark]:
    """Return the message of the scanner, the most likely remedy, and the place of the mistake."""
    context, problem = error.context or "", error.problem or "not readable"
    mark: Any = error.problem_mark
    opened: Any = error.context_mark or mark
    message = f"{context}, {problem}".removeprefix(", ")
    last = min(mark.line, len(lines) - 1)
    if (quote := _unclosed(lines, last)) is not None:
        return message, "close the quote at the end of its text", quote
    above = next((one for one in range(last - 1, -1, -1) if _has_text(lines[one])), last)
    for number in (min(opened.line, last), above, last):
        line = lines[number][:500]
        if _WORD.match(line) and not _KEY.match(line):
            message = f"this line is no `key: value` ({message})"
            hint = "write a plain colon and a blank behind the key, and a blank behind a dash"
            return message, hint, mark_at(number, len(line) - len(line.lstrip()))
    return (message, *_by_place(context, problem, lines[last], opened, mark))


def _has_text(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _unclosed(lines: Sequence[str], last: int) -> yaml.Mark | None:
    """Return the start of a quote that its line does not close, before the last line."""
    for number in range(last - 1, -1, -1):
        line = lines[number][:500]
        quote = _OPENED.search(line) if _has_text(line) else None
        if quote and line.replace("\\\\", "").replace('\\"', "").count(quote[1]) % 2:
            return mark_at(number, quote.start(1))
    return None


def _by_place(context: str, problem: str, line: str, opened: Any, mark: Any) -> tuple[str, Any]:
    before = line[max(0, mark.column - 500) : mark.column]
    first = match[1] if (match := _VALUE.match(line)) else ""
    if "unknown escape" in problem:
        hint = "use single quotes for regular expressions, e.g. 're:.*\\.bias'"
        # The mark of pure Python is not at the backslash.
        mark = mark_at(mark.line, line.rfind("\\", 0, mark.column + 1))
    elif "quoted" in context and "end of stream" in problem:
        # The scanner stopped at the end of the file, but the mistake is at the opening quote.
        hint, mark = "close the quote at the end of its text", opened
    elif "\t" in before + line[mark.column : mark.column + 1]:
        hint = "YAML does not allow tabs for indentation: use spaces"
    elif first in _INDICATORS and ("flow" not in context or "*" in before):
        hint = indicator_hint("*" if re.search(r"[\s\[,]\*+$", before) else first)
        mark = opened if "alias" in context else mark  # the asterisk, not the text after it
    elif "flow" in context:
        hint = f"is the bracket that opens on line {opened.line + 1} closed?"
    elif first and (first in "%@`]},|>" or (first in "\"'" and before.rstrip().endswith(first))):
        hint = f"quote text that starts with {first}"
    elif line.startswith(":", mark.column) and re.search(r":\s", before):
        hint = "quote text that holds a colon and a blank; a pattern is written 're:^x$'"
    else:
        hint = "give the keys of one mapping the same indentation"
    return hint, mark
