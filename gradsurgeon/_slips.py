"""What is wrong with a text that is not YAML: the slip that a person made, in the line where it was made.

Scanners notice a slip late, and name it in words about tokens. What a person did is found by looking at
the lines up to where the scanner gave up; both loaders of PyYAML word differently, the lines are the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

_INDICATORS = {"*": "an alias", "&": "an anchor", "!": "a tag", "[": "a list", "{": "a mapping"}
_VALUE = re.compile(r"\s*(?:- +)*(?:[^\s:\"'\[{]+:\s+)?(\S)")  # first character of a line's value
_OPENED = re.compile(r"(?:[:,\[{]|^\s*-)\s*([\"'])")


def mark_at(line: int, column: int) -> yaml.Mark:
    return yaml.Mark("", 0, line, column, None, 0)


def indicator_hint(char: str) -> str:
    return f'`{char}` starts {_INDICATORS[char]} in YAML: quote patterns, e.g. params: "*.weight"'


def syntax_error(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[str, str, yaml.Mark]:
    context, problem = error.context or "", error.problem or "not readable"
    mark: Any = error.problem_mark
    message = f"{context}, {problem}".removeprefix(", ")
    if (opened := _unclosed(lines, min(mark.line, len(lines) - 1))) is not None:
        told = f"the quote that opens on line {opened.line + 1} is not closed there ({message})"
        return told, "close the quote at the end of its text", opened
    hint, mark = _by_place(context, problem, lines, error.context_mark or mark, mark)
    return message, hint, mark


def _unclosed(lines: Sequence[str], last: int) -> yaml.Mark | None:
    """Return where a quote opens that its line does not close, before the last line."""
    for number in range(last - 1, -1, -1):
        line = lines[number][:500]
        quote = None if line.lstrip().startswith("#") else _OPENED.search(line)
        if quote and line.replace("\\\\", "").replace('\\"', "").count(quote[1]) % 2:
            return mark_at(number, quote.start(1))
    return None


def _by_place(
    context: str, problem: str, lines: list[str], opened: Any, mark: Any
) -> tuple[str, Any]:
    line = lines[mark.line] if mark.line < len(lines) else ""
    before = line[max(0, mark.column - 500) : mark.column]
    deep = line.startswith(":", mark.column) and re.fullmatch(r"\s*[\w-]+\s*", before)
    first = match[1] if (match := _VALUE.match(line)) and not deep else ""
    if "unknown escape" in problem:
        # Only libyaml's mark is at the backslash.
        at = mark_at(mark.line, line.rfind("\\", 0, mark.column + 1))
        return "use single quotes for regular expressions, e.g. 're:.*\\.bias'", at
    if "quoted" in context and "end of stream" in problem:
        # The file's end is where the scanner gave up, the fault is where the quote opens.
        return "close the quote", opened
    if "\t" in before + line[mark.column : mark.column + 1]:
        return "YAML does not allow tabs for indentation: use spaces", mark
    return _by_character(context, line, first, opened, mark)


def _by_character(context: str, line: str, first: str, opened: Any, mark: Any) -> tuple[str, Any]:
    before = line[max(0, mark.column - 500) : mark.column]
    if first in _INDICATORS and ("flow" not in context or "*" in before):
        hint = indicator_hint("*" if re.search(r"[\s\[,]\*+$", before) else first)
        return hint, opened if "alias" in context else mark  # the asterisk, not what is behind it
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
