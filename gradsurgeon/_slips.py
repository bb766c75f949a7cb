"""Mistakes in text that is not YAML: place and remedy.

Scanners notice a mistake late, and describe it in terms of tokens. The common mistakes have a remedy of their own.
The messages of PyYAML's two loaders differ, the lines do not.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

_INDICATORS = {"*": "an alias", "&": "an anchor", "!": "a tag", "[": "a list", "{": "a mapping"}
_VALUE = re.compile(r"\s*(?:- +)*(?:[^\s:\"'\[{]+:\s+)?(\S)")  # first character of a line's value
_OPENED = re.compile(r"(?:[:,\[{]|^\s*-)\s*([\"'])")
_GENERAL = (
    "align the keys of one mapping, put a blank behind each colon and dash, here and in the line above, and quote text "
    "that holds special characters"
)


def mark_at(line: int, column: int) -> yaml.Mark:
    return yaml.Mark("", 0, line, column, None, 0)


def indicator_hint(char: str) -> str:
    return f'`{char}` starts {_INDICATORS[char]} in YAML: quote patterns, e.g. params: "*.weight"'


def syntax_error(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[str, str, yaml.Mark]:
    """Return the message, the remedy and the place of an error of the scanner."""
    context, problem = error.context or "", error.problem or "not readable"
    mark: Any = error.problem_mark
    opened: Any = error.context_mark or mark
    message = f"{context}, {problem}".removeprefix(", ")
    if (quote := _unclosed(lines, min(mark.line, len(lines) - 1))) is not None:
        message = f"the quote that opens on line {quote.line + 1} is not closed there ({message})"
        return message, "close the quote at the end of its text", quote
    line = lines[mark.line] if mark.line < len(lines) else ""
    before = line[max(0, mark.column - 500) : mark.column]
    deep = line.startswith(":", mark.column) and re.fullmatch(r"\s*[\w-]+\s*", before)
    first = match[1] if (match := _VALUE.match(line)) and not deep else ""
    if "unknown escape" in problem:
        # The mark of pure Python is not at the backslash.
        at = mark_at(mark.line, line.rfind("\\", 0, mark.column + 1))
        return message, "use single quotes for regular expressions, e.g. 're:.*\\.bias'", at
    if "\t" in before + line[mark.column : mark.column + 1]:
        return message, "YAML does not allow tabs for indentation: use spaces", mark
    if first in _INDICATORS and ("flow" not in context or "*" in before):
        hint = indicator_hint("*" if re.search(r"[\s\[,]\*+$", before) else first)
        return message, hint, opened if "alias" in context else mark  # the asterisk, not its text
    if "flow" in context:
        return message, f"is the bracket that opens on line {opened.line + 1} closed?", mark
    return message, _GENERAL, opened if "simple key" in context else mark


def _unclosed(lines: Sequence[str], last: int) -> yaml.Mark | None:
    """Return the start of a quote that its line does not close, before the last line."""
    for number in range(last - 1, -1, -1):
        line = lines[number][:500]
        quote = None if line.lstrip().startswith("#") else _OPENED.search(line)
        if quote and line.replace("\\\\", "").replace('\\"', "").count(quote[1]) % 2:
            return mark_at(number, quote.start(1))
    return None
