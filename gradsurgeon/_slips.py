"""Mistakes in text that is not YAML, each in the line of the mistake.

Scanners notice a mistake late, and describe it in terms of tokens. So the lines up to the scanner's mark are
searched for typical mistakes. The messages of PyYAML's two loaders differ, the lines do not.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

_INDICATORS = {"*": "an alias", "&": "an anchor", "!": "a tag", "[": "a list", "{": "a mapping"}
_VALUE = re.compile(r"\s*(?:- +)*(?:[^\s:\"'\[{]+:\s+)?(\S)")  # first character of a line's value
_ENTRY = re.compile(r"(\s*(?:- +)*)[^\s\"'\[{#:-][^:#]*:(?:\s|$)")  # `key:` alone, or with a value
_OPENED = re.compile(r"(?:[:,\[{]|^\s*-)\s*([\"'])")
_NO_BLANK = re.compile(r"\s*(?:- +)*([A-Za-z_][\w-]*):([^\s:/].*)")
_NO_DASH = re.compile(r"\s*-([A-Za-z_][\w-]*:.*)")
_EQUALS = re.compile(r"\s*(?:- +)*([A-Za-z_][\w-]*)\s*=\s*(\S.*)")
_FOREIGN = re.compile("\\s*(?:- +)*[A-Za-z_][\\w-]*(?::(?=[\u00a0\u3000])|\uff1a)")
_SHOWN, _LOOKED_AT = 60, 50


def mark_at(line: int, column: int) -> yaml.Mark:
    return yaml.Mark("", 0, line, column, None, 0)


def indicator_hint(char: str) -> str:
    return f'`{char}` starts {_INDICATORS[char]} in YAML: quote patterns, e.g. params: "*.weight"'


def syntax_error(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[str, str, yaml.Mark]:
    context, problem = error.context or "", error.problem or "not readable"
    mark: Any = error.problem_mark
    opened: Any = error.context_mark or mark
    message = f"{context}, {problem}".removeprefix(", ")
    slip = _slip(lines, opened, mark)
    if slip is None and ("block" in context or "mapping values" in problem):
        slip = _misaligned(lines, mark.line)
    if slip is not None:
        return (f"{slip[0]} ({message})" if slip[0] else message), slip[1], slip[2]
    hint, mark = _by_place(context, problem, lines, opened, mark)
    return message, hint, mark


def _slip(lines: list[str], opened: Any, mark: Any) -> tuple[str, str, yaml.Mark] | None:
    """Return the mistake, the remedy and the place; ``None`` for an unknown mistake."""
    last = min(mark.line, len(lines) - 1)
    if (at := _unclosed(lines, last)) is not None:
        message = f"the quote that opens on line {at.line + 1} is not closed there"
        return message, "close the quote at the end of its text", at
    above = next((one for one in range(last - 1, -1, -1) if _has_text(lines[one])), last)
    for number in dict.fromkeys((min(opened.line, last), above, last)):
        if remedy := _no_entry(lines[number]):
            start = len(lines[number]) - len(lines[number].lstrip())
            return "this line is no `key: value`", remedy, mark_at(number, start)
    return None


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


def _no_entry(line: str) -> str:
    """Return the remedy for a key and its value that YAML reads as a text."""
    line = line[:500]
    if match := _FOREIGN.match(line):
        what = "colon" if match[0].endswith("\uff1a") else "blank behind the colon"
        return f"the {what} is another character that looks like one: type it again"
    if match := _NO_DASH.match(line):
        return f"write a space after the dash: `- {match[1][:_SHOWN]}`"
    if match := _NO_BLANK.match(line):
        return f"write a space after the colon: `{match[1]}: {match[2][:_SHOWN]}`"
    if match := _EQUALS.match(line):
        return f"write a colon: `{match[1]}: {match[2][:_SHOWN]}`"
    return ""


def _misaligned(lines: Sequence[str], last: int) -> tuple[str, str, yaml.Mark] | None:
    """Return the mistake, the remedy and the place of a key in a column of its own."""
    near = range(max(0, last - _LOOKED_AT), min(last + 1, len(lines)))
    entries = [(number, _ENTRY.match(lines[number][:500])) for number in near]
    keys = [(number, entry) for number, entry in entries if entry is not None]
    if len(keys) < 2 or keys[-1][0] != last or "-" in keys[-1][1][1]:  # noqa: PLR2004 # a pair
        return None
    columns = [len(entry[1]) for _, entry in keys]
    *above, column = columns
    opens = keys[-2][1][0] == lines[keys[-2][0]]  # `steps:` alone, with its value below
    if column in above or (opens and column > above[-1]) or "\t" in keys[-1][1][1]:
        return None
    message = f"the key begins in column {column + 1}, the key above it in column {above[-1] + 1}"
    hint = "align the keys of one mapping: give them the same indentation"
    return message, hint, mark_at(last, column)


def _by_place(
    context: str, problem: str, lines: list[str], opened: Any, mark: Any
) -> tuple[str, Any]:
    line = lines[mark.line] if mark.line < len(lines) else ""
    before = line[max(0, mark.column - 500) : mark.column]
    deep = line.startswith(":", mark.column) and re.fullmatch(r"\s*[\w-]+\s*", before)
    first = match[1] if (match := _VALUE.match(line)) and not deep else ""
    if "unknown escape" in problem:
        # The mark of pure Python is not at the backslash.
        at = mark_at(mark.line, line.rfind("\\", 0, mark.column + 1))
        return "use single quotes for regular expressions, e.g. 're:.*\\.bias'", at
    if "quoted" in context and "end of stream" in problem:
        # The scanner stopped at the end of the file, but the mistake is at the opening quote.
        return "close the quote", opened
    if "\t" in before + line[mark.column : mark.column + 1]:
        return "YAML does not allow tabs for indentation: use spaces", mark
    return _by_character(context, line, first, opened, mark)


def _by_character(context: str, line: str, first: str, opened: Any, mark: Any) -> tuple[str, Any]:
    before = line[max(0, mark.column - 500) : mark.column]
    if first in _INDICATORS and ("flow" not in context or "*" in before):
        hint = indicator_hint("*" if re.search(r"[\s\[,]\*+$", before) else first)
        return hint, opened if "alias" in context else mark  # the asterisk, not the text after it
    if "flow" in context:
        return f"is the bracket that opens on line {opened.line + 1} closed?", mark
    if first and first in "%@`]},|>":
        return f"quote text that starts with {first}", mark
    if first and first in "\"'" and before.rstrip().endswith(first):
        hint = "no text may follow the closing quote; write a quote inside quotes twice: ''"
        return hint, mark
    if line.startswith(":", mark.column) and re.search(r":\s", before):
        return "quote text that holds a colon and a blank; a pattern is written 're:^x$'", mark
    return "check the indentation, and for a blank after the colon in the lines above", mark
