"""``gradsurgeon explain``: the page of an action or a check, built from its class. Never imports torch."""

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gradsurgeon.actions import TARGETS, Example, Rule, TargetKind, known_actions, written
from gradsurgeon.cli import fail
from gradsurgeon.cli.options import add_import
from gradsurgeon.cli.review.checks import CHECKS
from gradsurgeon.cli.review.formats import all_checks
from gradsurgeon.cli.schema import rule_schema
from gradsurgeon.errors import did_you_mean, printable

_WIDTH = 100
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", metavar="NAME", help="an action or a check; without it: a list of all"
    )
    add_import(parser)


def run(arguments: argparse.Namespace) -> int:
    name, checks = arguments.action, all_checks()
    if name is None:
        summaries = {action: _summary(rule) for action, rule in known_actions.items()}
        summaries |= {check: checks[check].summary for check in sorted(checks)}
        width = max(map(len, summaries))
        page = [f"{key.ljust(width)}  {summary}" for key, summary in summaries.items()]
        print("\n".join(page))
        return 0
    if name in known_actions:
        rule = known_actions[name]
        shared = options_table([(rule, key) for key in keys(rule, shared=True)])
        page = [*action_page(rule), "", "**Options of every rule.**", "", *shared]
    elif name in checks:
        page = list(check_page(name))
    else:
        hint = did_you_mean(name, (*known_actions, *checks))
        hint = hint or f"known: {', '.join(known_actions)}; without a name, a list of the checks"
        return fail(f"unknown action or check `{printable(name[:60])}` ({hint})")
    for line in page:
        print(line if line.startswith(("|", " ")) else textwrap.fill(line, _WIDTH))
    return 0


def action_page(rule: type[Rule]) -> Iterator[str]:
    yield from (f"`{rule.name()}`", "", _summary(rule), *_sections(rule), "", _acts_on(rule))
    if options := keys(rule, shared=False):
        yield from ("", *options_table([(rule, key) for key in options], inner=True))
    yield from ("", *_rule_file(_examples(rule)))


def check_page(name: str) -> Iterator[str]:
    about = all_checks()[name]
    yield from (f"`{name}` ({about.severity})", "", about.summary)
    if name not in CHECKS:
        return
    check = CHECKS[name]
    yield from _paragraphs(check.page.partition("\n")[2])
    yield from ("", "Found:", "", *_rule_file(f"- {rule}" for rule in check.bad))


def _summary(described: type[Rule]) -> str:
    return (described.__doc__ or "").partition("\n")[0]


def _sections(described: type[Rule]) -> Iterator[str]:
    body = inspect.cleandoc(described.__doc__ or "").partition("\n")[2]
    for section in re.split(r"^## ", body, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        yield from _paragraphs(f"**{heading}.** {text.strip()}")


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in filter(str.strip, text.split("\n\n")):
        yield from ("", " ".join(paragraph.split()))


def _acts_on(rule: type[Rule]) -> str:
    targets = ", ".join(f"`{kind}`" for kind in rule.targets)
    if not rule.takes_at:
        return f"Acts on {targets}. It has no `at`: it acts at a moment of its own."
    default = "no default" if rule.needs_at else f"`{rule.points[0]}` by default"
    points = ", ".join(f"`{point}`" for point in rule.points)
    return f"Acts on {targets}; on parameters at {points} ({default})."


def options_table(
    options: Iterable[tuple[type[Rule], str]], *, inner: bool = False
) -> Iterator[str]:
    """Yield the lines of a table of options; with ``inner``, keys of mappings have their own lines."""
    rows = [("option", "type", "default", "meaning")]
    for rule, key in options:
        branch = rule_schema(rule)
        info = branch["properties"][key]
        default = _needed(rule, key) or _default(branch, key)
        rows.append((f"`{key}`", _type(info), default, _meaning(info)))
        for name, one in info.get("properties", {}).items() if inner else ():
            rows.append((f"`{name}` in `{key}`", _type(one), _default(info, name), _meaning(one)))
    yield from table(rows)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        if number == 0:
            yield "|---" * len(row) + "|"


def keys(rule: type[Rule], *, shared: bool) -> list[str]:
    """Return the own options of an action, or the options that every rule shares; required ones come first."""
    branch = rule_schema(rule)
    keys = [key for key in branch["properties"] if key != "action" and (key in _SHARED) is shared]
    return sorted(keys, key=lambda key: key not in branch["required"])


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
    return " or ".join(names)


def _meaning(info: Mapping[str, Any]) -> str:
    description = str(info.get("description", ""))
    if "properties" in info:
        return f"{description} Keys: {', '.join(info['properties'])}."
    if "enum" in info.get("items", {}):
        return f"{description} Any of: {', '.join(info['items']['enum'])}."
    return description


def _needed(rule: type[Rule], key: str) -> str:
    """Return when an option must be given, if that depends on others."""
    if key in rule.targets and len(rule.targets) > 1:
        return f"one of {'three' if len(rule.targets) == len(TARGETS) else 'two'}"
    needs: dict[TargetKind, str] = dict(rule.needs)
    if rule.needs_at:
        needs["params"] = "at"
    for target, option in needs.items():
        if key == option:
            return f"needed with {target}"
    return "needed with modules" if key == "tensor" and "modules" in rule.targets else ""


def _default(branch: Mapping[str, Any], key: str) -> str:
    if key in branch.get("required", ()):
        return "must be given"
    default = branch["properties"][key].get("default")
    return "-" if default is None else written(default)


def _rule_file(rules: Iterable[str]) -> Iterator[str]:
    yield from ("```yaml", "version: 1", "rules:")
    yield from (f"  {line}" if line else "" for line in rules)
    yield "```"


def _examples(rule: type[Rule]) -> Iterator[str]:
    # Without examples one gradient cannot show the effect.
    shown = [({"params": "*", **one.options}, list(_effect(one))) for one in rule.EXAMPLES] or [
        (_TARGET_EXAMPLES[kind], []) for kind in rule.targets
    ]
    for number, (options, effect) in enumerate(shown, 1):
        yield from [""] * (number > 1)
        yield f"- id: example-{number}"
        yield f"  action: {rule.name()}"
        for key, value in options.items():
            # Patterns are always quoted.
            yield f"  {key}: {json.dumps(value) if key in TARGETS else written(value)}"
        yield from effect


def _effect(example: Example) -> Iterator[str]:
    given = example.losses or {"gradient": example.grad}
    for name, grad in given.items():
        yield f"  # {name}: {_numbers(grad)}"
    if example.expect is not None:
        yield f"  # becomes: {_numbers(example.expect)}"
    elif example.record is not None:
        recorded = (f"{key} {one:g}" for key, one in example.record.items())
        yield f"  # recorded: {', '.join(recorded)}"
    else:
        yield f"  # trips: {'yes' if example.trips else 'no'}"


def _numbers(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"
