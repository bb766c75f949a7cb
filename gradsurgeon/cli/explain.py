"""``gradsurgeon explain``: the page of an action, made from its class. Never imports torch."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradsurgeon.actions import ACTIONS, Example, Rule, written
from gradsurgeon.cli import fail
from gradsurgeon.cli.schema import rule_schema
from gradsurgeon.errors import did_you_mean, printable

if TYPE_CHECKING:
    import argparse

_MAX_WIDTH = 100
_TYPES = {
    "number": "number",
    "integer": "whole number",
    "boolean": "true or false",
    "string": "text",
    "array": "list",
    "object": "mapping",
}
_SHARED = frozenset(Rule.model_fields) - {"action", "at"}


def run(arguments: argparse.Namespace) -> int:
    """Print the page of one action, or the list of all."""
    name = arguments.action
    if name is None:
        width = max(map(len, ACTIONS))
        for action, rule in ACTIONS.items():
            print(f"{action.ljust(width)}  {_summary(rule)}")
        return 0
    if name not in ACTIONS:
        hint = did_you_mean(name, ACTIONS) or f"known: {', '.join(ACTIONS)}"
        return fail(f"unknown action `{printable(name[:60])}` ({hint})")
    print("\n".join(page(ACTIONS[name])))
    return 0


def page(rule: type[Rule]) -> Iterator[str]:
    """Yield the lines of the page of an action."""
    yield f"{rule.name()}: {_summary(rule)}"
    body = inspect.cleandoc(rule.__doc__ or "").partition("\n")[2]
    for section in re.split(r"^## ", body, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        yield from _section(heading, _paragraphs(text))
    branch = rule_schema(rule)
    own = [key for key in branch["properties"] if key not in _SHARED and key != "action"]
    if own:
        yield from _section("Options", _table(branch, own))
    if not rule.takes_at:
        yield from ("", f"  It takes no `at`: {rule.no_at_reason()}.")
    shared = [key for key in branch["properties"] if key in _SHARED]
    yield from _section("Options of every rule", _table(branch, shared))
    yield from _section("Examples", _examples(rule))


def _summary(rule: type[Rule]) -> str:
    return (rule.__doc__ or "").partition("\n")[0]


def _section(heading: str, lines: Iterable[str]) -> Iterator[str]:
    yield from ("", heading, *(f"  {line}" if line else "" for line in lines))


def _paragraphs(text: str) -> Iterator[str]:
    for index, paragraph in enumerate(text.strip().split("\n\n")):
        yield from [""] * bool(index)
        yield from textwrap.wrap(" ".join(paragraph.split()), _width() - 2)


def _width() -> int:
    return min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 24)).columns)


def _table(branch: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    """Yield name, type, default and meaning of options; the meaning goes on in its column."""
    rows = [("option", "type", "default", "")]
    for key in keys:
        info = branch["properties"][key]
        default = "must be given" if key in branch["required"] else _default(info)
        rows.append((key, _type(info), default, _meaning(info)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    indent = " " * (sum(widths) + 6)
    for row in rows:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines = textwrap.wrap(row[3], max(24, _width() - len(indent) - 2)) or [""]
        yield f"{cells}  {lines[0]}".rstrip()
        yield from (indent + line for line in lines[1:])


def _type(info: Mapping[str, Any]) -> str:
    """Return the type of an option in words."""
    if "const" in info:
        return str(info["const"])
    if "enum" in info:
        return " | ".join(map(str, info["enum"]))
    if "anyOf" in info:  # the only option of two types
        return "pattern or list of patterns"
    return _TYPES[info["type"]]


def _meaning(info: Mapping[str, Any]) -> str:
    """Return what an option means, with what may stand in it."""
    description = str(info.get("description", ""))
    if "properties" in info:
        return f"{description} Keys: {', '.join(info['properties'])}."
    if "enum" in info.get("items", {}):
        return f"{description} Any of: {', '.join(info['items']['enum'])}."
    return description


def _default(info: Mapping[str, Any]) -> str:
    default = info.get("default")
    return "-" if default is None else _yaml(default)


def _examples(rule: type[Rule]) -> Iterator[str]:
    """Yield each example as a rule that can be copied, with what it does to one gradient."""
    for number, example in enumerate(rule.EXAMPLES, 1):
        yield from [""] * (number > 1)
        yield f"- id: example-{number}"
        yield f"  action: {rule.name()}"
        yield '  params: "*"'
        yield from (f"  {key}: {_yaml(value)}" for key, value in example.options.items())
        yield f"  # gradient  {_numbers(example.grad)}"
        yield f"  # {_outcome(example)}"


def _outcome(example: Example) -> str:
    if example.expect is not None:
        return f"becomes   {_numbers(example.expect)}"
    if example.record is not None:
        return f"recorded  {', '.join(f'{key} {one:g}' for key, one in example.record.items())}"
    return f"trips     {'yes' if example.trips else 'no'}"


def _numbers(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


def _yaml(value: Any) -> str:
    """Return a value as a rule file spells it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[a-z][a-z0-9-]*", value) else json.dumps(value)
    return written(value)
