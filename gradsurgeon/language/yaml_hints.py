"""What to do about text that is no YAML."""

import re

import yaml

_INDICATORS = {"*": "an alias", "&": "an anchor", "!": "a tag", "[": "a list", "{": "a mapping"}
_VALUE = re.compile(r"\s*(?:- +)*(?:[^\s:\"'\[{]+:\s+)?(\S)")  # first character of a line's value


def indicator_hint(char: str) -> str:
    return f'`{char}` starts {_INDICATORS[char]} in YAML: quote patterns, e.g. params: "*.weight"'


# A bound that has yet to be found. Only `plan --thresholds` reads it.
OPEN_BOUND = re.compile(r"(?<=:[ \t])\?(?=[ \t]*(?:[,}#]|\r?$))", re.MULTILINE)


def hint_for(error: yaml.MarkedYAMLError, line: str) -> str:
    if OPEN_BOUND.search(line[:500]):
        return "`?` stands for a bound in `gradsurgeon plan FILE --on RUN --thresholds` alone, which shows what it could be"
    context = error.context or ""
    first = ""
    value = _VALUE.match(line[:500])
    if "alias" in context:
        first = "*"
    elif value is not None:
        first = value[1]
    if "\t" in line:
        return "YAML does not allow tabs for indentation: use spaces"
    if "unknown escape" in (error.problem or ""):
        return "use single quotes for regular expressions, e.g. 're:.*\\.bias'"
    if first in _INDICATORS and "flow" not in context:
        return indicator_hint(first)
    if error.context_mark and "flow" in context:
        opened = error.context_mark.line + 1
        return f"is the quote or the bracket that opens on line {opened} closed?"
    return (
        "quote text with special characters, write `key: value` with a blank behind the colon, and give the "
        "keys of one mapping the same indentation; the mistake may be in the line above"
    )
