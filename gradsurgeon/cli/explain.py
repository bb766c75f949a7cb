"""``gradsurgeon explain``: the page of an action or a check, made from its class. Never imports torch."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradsurgeon.actions import ACTIONS, TARGETS, Example, Rule, TargetKind, known_actions, written
from gradsurgeon.cli import fail
from gradsurgeon.cli.schema import rule_schema
from gradsurgeon.errors import did_you_mean, printable
from gradsurgeon.review.checks import CHECKS, Check
from gradsurgeon.review.linter import severities
from gradsurgeon.review.reading_checks import READING_CHECKS

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


_TARGET_EXAMPLES: dict[TargetKind, dict[str, str]] = {
    "params": {"params": "backbone.*"},
    "modules": {"modules": "*.attn", "tensor": "output"},
    "tensors": {"tensors": "hidden"},
}


def run(arguments: argparse.Namespace) -> int:
    """Print the page of one action or check, or the list of all."""
    name = arguments.action
    checks = severities()
    if name is None:
        width = max(map(len, (*known_actions, *checks)))
        for action, rule in known_actions.items():
            print(f"{action.ljust(width)}  {_summary(rule)}")
        for check in sorted(checks):
            print(f"{check.ljust(width)}  {_check_summary(check)}")
        return 0
    if name in known_actions:
        print("\n".join(page(known_actions[name])))
    elif name in checks:
        print("\n".join(check_page(name)))
    else:
        hint = did_you_mean(name, (*known_actions, *checks))
        near = hint.split("`")[1] if hint else ""
        kind = ("action" if near in known_actions else "check") if near else "action or check"
        hint = (
            hint or f"known: {', '.join(known_actions)}; without a name the checks are listed, too"
        )
        return fail(f"unknown {kind} `{printable(name[:60])}` ({hint})")
    return 0


def check_page(name: str) -> Iterator[str]:
    """Yield the lines of the page of a check."""
    yield f"{name} ({severities()[name]}): {_check_summary(name)}"
    if name not in CHECKS:
        yield from ("", *(f"  {line}" for line in _paragraphs(READING_CHECKS[name].help)))
        return
    check = CHECKS[name]
    yield from ("", *(f"  {line}" if line else "" for line in _paragraphs(_body(type(check)))))
    yield from _section(_found(check), check.BAD.strip().splitlines())


def _found(check: Check, tick: str = "") -> str:
    """Return the heading of the example of a check."""
    names = ", ".join(f"{tick}{name}{tick}" for name in check.NAMES)
    return f"Found, in a model with the parameters {names}" if names else "Found"


def _check_summary(name: str) -> str:
    return _summary(type(CHECKS[name])) if name in CHECKS else READING_CHECKS[name].summary


def page(rule: type[Rule]) -> Iterator[str]:
    """Yield the lines of the page of an action."""
    yield f"{rule.name()}: {_summary(rule)}"
    for heading, text in _sections(rule):
        yield from _section(heading, _paragraphs(text))
    branch = rule_schema(rule)
    if options := _keys(rule, shared=False):
        yield from _section("Options", _table(branch, options))
    if not rule.takes_at:
        yield from ("", f"  It takes no `at`: {rule.no_at_reason()}.")
    yield from _section("Options of every rule", _table(branch, _keys(rule, shared=True)))
    yield from _section("Examples", _examples(rule))


def reference() -> str:
    """Return the pages of all actions as Markdown, as `rules/reference.md` holds them."""
    rules = list(ACTIONS.values())
    shared = list(dict.fromkeys(key for rule in rules for key in _keys(rule, shared=True)))
    widest = {key: next(r for r in rules if key in _keys(r, shared=True)) for key in shared}
    rows = [row for key in shared for row in _rows(rule_schema(widest[key]), [key])]
    lines = ["### Options of every rule", "", *_markdown_table(rows)]
    for rule in rules:
        lines += ["", f"### `{rule.name()}`", "", _summary(rule)]
        for heading, text in _sections(rule):
            paragraphs = (" ".join(one.split()) for one in text.strip().split("\n\n"))
            lines += ["", f"**{heading}.** " + "\n\n".join(paragraphs)]
        lines += ["", _acts_on(rule)]
        if options := _keys(rule, shared=False):
            lines += ["", *_markdown_table(_rows(rule_schema(rule), options))]
        lines += ["", "```yaml", "version: 1", "rules:"]
        lines += [f"  {line}" if line else "" for line in _examples(rule)]
        lines += ["```"]
    return "\n".join([*lines, "", *_checks_reference()]) + "\n"


def _checks_reference() -> Iterator[str]:
    yield from ("### Checks", "", "What `lint` asks of rules that can be read.")
    for name, check in CHECKS.items():
        yield from ("", f"#### `{name}` ({check.severity})", "", _check_summary(name))
        for paragraph in _body(type(check)).strip().split("\n\n"):
            yield from ("", " ".join(paragraph.split()))
        yield from ("", f"{_found(check, '`')}:", "", "```yaml", "version: 1", "rules:")
        yield from (f"  {line}" if line else "" for line in check.BAD.strip().splitlines())
        yield "```"
    yield from (
        "",
        "### Checks of reading",
        "",
        "What is wrong with a file that cannot be used, words that other readers take for something",
    )
    yield from ("else, and comments that suppress nothing.", "")
    yield from ("| check | severity | finds | what to do |", "|---|---|---|---|")
    for name, about in READING_CHECKS.items():
        cells = (f"`{name}`", about.severity, about.summary, about.help)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _acts_on(rule: type[Rule]) -> str:
    targets = ", ".join(f"`{kind}`" for kind in rule.targets)
    if not rule.takes_at:
        return f"Acts on {targets}. It takes no `at`: {rule.no_at_reason()}."
    default = "no default" if rule.needs_at else f"`{rule.points[0]}` by default"
    points = ", ".join(f"`{point}`" for point in rule.points)
    return f"Acts on {targets}; of parameters at {points} ({default})."


def _markdown_table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| option | type | default | meaning |"
    yield "|---|---|---|---|"
    for key, kind, default, meaning in rows:
        cells = [f"`{key}`", kind, default, meaning]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _keys(rule: type[Rule], *, shared: bool) -> list[str]:
    """Return the options of an action: those of every rule, or those of its own."""
    keys = [key for key in rule_schema(rule)["properties"] if key != "action"]
    return [key for key in keys if (key in _SHARED) is shared]


def _body(kind: type[Rule | Check]) -> str:
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[2]


def _sections(rule: type[Rule]) -> Iterator[tuple[str, str]]:
    """Yield heading and text of each part of the docstring of an action."""
    for section in re.split(r"^## ", _body(rule), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        yield heading, text


def _summary(rule: type[Rule | Check]) -> str:
    return (rule.__doc__ or "").partition("\n")[0]


def _section(heading: str, lines: Iterable[str]) -> Iterator[str]:
    yield from ("", heading, *(f"  {line}" if line else "" for line in lines))


def _paragraphs(text: str) -> Iterator[str]:
    for index, paragraph in enumerate(text.strip().split("\n\n")):
        yield from [""] * bool(index)
        yield from textwrap.wrap(" ".join(paragraph.split()), _width() - 2)


def _width() -> int:
    return min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 24)).columns)


def _rows(branch: Mapping[str, Any], keys: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    for key in keys:
        info = branch["properties"][key]
        yield key, _type(info), _default(branch, key), _meaning(info)


def _table(branch: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table of options; the meaning goes on in its column."""
    rows = [("option", "type", "default", ""), *_rows(branch, keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    indent = " " * (sum(widths) + 6)
    for row in rows:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines = textwrap.wrap(row[3], max(24, _width() - len(indent) - 2)) or [""]
        yield f"{cells}  {lines[0]}".rstrip()
        yield from (indent + line for line in lines[1:])


def _type(info: Mapping[str, Any]) -> str:
    if "const" in info:
        return str(info["const"])
    if "enum" in info:
        return " | ".join(map(str, info["enum"]))
    if "anyOf" not in info:
        return _TYPES[info["type"]]
    names = [_type(one) for one in info["anyOf"]]
    if names == ["text", "list"]:
        return "pattern or list of patterns"
    # Words that are listed for editors are a text like any other.
    return "text" if "text" in names else " or ".join(names)


def _meaning(info: Mapping[str, Any]) -> str:
    """Return what an option means, with what may stand in it."""
    description = str(info.get("description", ""))
    if "properties" in info:
        return f"{description} Keys: {', '.join(info['properties'])}."
    if "enum" in info.get("items", {}):
        return f"{description} Any of: {', '.join(info['items']['enum'])}."
    return description


def _default(branch: Mapping[str, Any], key: str) -> str:
    """Return the default of an option, or when it must be given."""
    if key in branch["required"]:
        return "must be given"
    choices = [one for part in branch.get("allOf", ()) for one in part["anyOf"]]
    if key in (kind for one in choices for kind in one["required"]):
        return "one of three"
    for target, needed in branch.get("dependentRequired", {}).items():
        if key in needed:
            return f"needed with {target}"
    default = branch["properties"][key].get("default")
    return "-" if default is None else _yaml(default)


def _examples(rule: type[Rule]) -> Iterator[str]:
    """Yield each example as a rule that can be copied, with what it does to one gradient."""
    for number, example in enumerate(rule.EXAMPLES, 1):
        yield from [""] * (number > 1)
        yield from _rule(rule, number, {"params": "*", **example.options})
        yield f"  # gradient  {_numbers(example.grad)}"
        yield f"  # {_outcome(example)}"
    if not rule.EXAMPLES:  # what it does is not to be seen on one gradient
        for number, kind in enumerate(rule.targets, 1):
            yield from [""] * (number > 1)
            yield from _rule(rule, number, _TARGET_EXAMPLES[kind])


def _rule(rule: type[Rule], number: int, options: Mapping[str, Any]) -> Iterator[str]:
    yield f"- id: example-{number}"
    yield f"  action: {rule.name()}"
    for key, value in options.items():
        # Patterns are quoted always, and so are texts that YAML would take for something else.
        quoted = key in TARGETS or not re.fullmatch(r"[a-z][a-z0-9.-]*", str(value))
        yield f"  {key}: {json.dumps(value) if isinstance(value, str) and quoted else _yaml(value)}"


def _outcome(example: Example) -> str:
    if example.expect is not None:
        return f"becomes   {_numbers(example.expect)}"
    if example.record is not None:
        return f"recorded  {', '.join(f'{key} {one:g}' for key, one in example.record.items())}"
    return f"trips     {'yes' if example.trips else 'no'}"


def _numbers(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


def _yaml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[a-z][a-z0-9-]*", value) else json.dumps(value)
    return written(value)
