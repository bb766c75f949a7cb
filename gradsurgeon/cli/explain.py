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
from gradsurgeon.cli.review.formats import CheckInfo, all_checks
from gradsurgeon.cli.schema import rule_schema, summary_of
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
    name = arguments.action
    checks = all_checks()
    if name is None:
        _print_summaries(checks)
        return 0
    if name in known_actions:
        rule = known_actions[name]
        page = [*action_page(rule), "", "**Options of every rule.**", ""]
        page += options_table([(rule, key) for key in keys(rule, shared=True)])
    elif name in checks:
        page = list(check_page(name))
    else:
        hint = did_you_mean(name, (*known_actions, *checks))
        if not hint:
            hint = f"known: {', '.join(known_actions)}; without a name, a list of the checks"
        return fail(f"unknown action or check `{printable(name[:60])}` ({hint})")
    for line in page:
        if line.startswith(("|", " ")):
            print(line)
        else:
            print(textwrap.fill(line, _WIDTH))
    return 0


def _print_summaries(checks: Mapping[str, CheckInfo]) -> None:
    summaries = {action: summary_of(rule) for action, rule in known_actions.items()}
    for check in sorted(checks):
        summaries[check] = checks[check].summary
    width = max(map(len, summaries))
    for name, summary in summaries.items():
        print(f"{name.ljust(width)}  {summary}")


def action_page(rule: type[Rule]) -> Iterator[str]:
    yield f"`{rule.name()}`"
    yield ""
    yield summary_of(rule)
    yield from _sections(rule)
    yield ""
    yield _acts_on(rule)
    own_options = [(rule, key) for key in keys(rule, shared=False)]
    if own_options:
        yield ""
        yield from options_table(own_options, inner=True)
    yield ""
    yield from _rule_file(_examples(rule))


def check_page(name: str) -> Iterator[str]:
    info = all_checks()[name]
    yield f"`{name}` ({info.severity})"
    yield ""
    yield info.summary
    if name not in CHECKS:
        return
    check = CHECKS[name]
    yield from _paragraphs(check.page.partition("\n")[2])
    yield ""
    yield "Found:"
    yield ""
    yield from _rule_file(f"- {rule}" for rule in check.bad)


def _sections(rule: type[Rule]) -> Iterator[str]:
    body = inspect.cleandoc(rule.__doc__ or "").partition("\n")[2]
    for section in re.split(r"^## ", body, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        yield from _paragraphs(f"**{heading}.** {text.strip()}")


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        words = paragraph.split()
        if words:
            yield ""
            yield " ".join(words)


def _acts_on(rule: type[Rule]) -> str:
    targets = ", ".join(f"`{target}`" for target in rule.targets)
    if not rule.takes_at:
        return f"Acts on {targets}. It has no `at`: it acts at a moment of its own."
    points = ", ".join(f"`{point}`" for point in rule.points)
    default = f"`{rule.points[0]}` by default"
    if rule.needs_at:
        default = "no default"
    return f"Acts on {targets}; on parameters at {points} ({default})."


def options_table(
    options: Iterable[tuple[type[Rule], str]], *, inner: bool = False
) -> Iterator[str]:
    """Yield the lines of a table of options; with ``inner``, keys of mappings have their own lines."""
    rows = [("option", "type", "default", "meaning")]
    for rule, key in options:
        branch = rule_schema(rule)
        info = branch["properties"][key]
        default = _needed(rule, key)
        if not default:
            default = _default(branch, key)
        rows.append((f"`{key}`", _type(info), default, _meaning(info)))
        if not inner or "properties" not in info:
            continue
        for name, part in info["properties"].items():
            option = f"`{name}` in `{key}`"
            rows.append((option, _type(part), _default(info, name), _meaning(part)))
    yield from table(rows)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield "|---" * len(row) + "|"


def keys(rule: type[Rule], *, shared: bool) -> list[str]:
    """Return the own options of an action, or the options that every rule shares; required ones come first."""
    branch = rule_schema(rule)
    required = []
    others = []
    for key in branch["properties"]:
        if key == "action" or (key in _SHARED) is not shared:
            continue
        if key in branch["required"]:
            required.append(key)
        else:
            others.append(key)
    return required + others


def _type(info: Mapping[str, Any]) -> str:
    if "const" in info:
        return str(info["const"])
    if "enum" in info:
        return " | ".join(map(str, info["enum"]))
    if "anyOf" not in info:
        return _TYPES[info["type"]]
    names = [_type(choice) for choice in info["anyOf"]]
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
        if len(rule.targets) == len(TARGETS):
            return "one of three"
        return "one of two"
    needs: dict[TargetKind, str] = dict(rule.needs)
    if rule.needs_at:
        needs["params"] = "at"
    for target, option in needs.items():
        if key == option:
            return f"needed with {target}"
    if key == "tensor" and "modules" in rule.targets:
        return "needed with modules"
    return ""


def _default(branch: Mapping[str, Any], key: str) -> str:
    if key in branch.get("required", ()):
        return "must be given"
    default = branch["properties"][key].get("default")
    if default is None:
        return "-"
    return written(default)


def _rule_file(rules: Iterable[str]) -> Iterator[str]:
    yield "```yaml"
    yield "version: 1"
    yield "rules:"
    for line in rules:
        if line:
            yield f"  {line}"
        else:
            yield ""
    yield "```"


def _examples(rule: type[Rule]) -> Iterator[str]:
    """Yield the examples of an action as rules, each with its effect as comments."""
    examples: list[tuple[Mapping[str, Any], list[str]]] = []
    for example in rule.EXAMPLES:
        options: Mapping[str, Any] = {"params": "*", **example.options}
        examples.append((options, list(_effect(example))))
    if not examples:
        # No single gradient can show the effect.
        examples = [(_TARGET_EXAMPLES[target], []) for target in rule.targets]
    for number, (options, effect) in enumerate(examples, 1):
        if number > 1:
            yield ""
        yield f"- id: example-{number}"
        yield f"  action: {rule.name()}"
        for key, value in options.items():
            if key in TARGETS:
                # Patterns are always quoted.
                yield f"  {key}: {json.dumps(value)}"
            else:
                yield f"  {key}: {written(value)}"
        yield from effect


def _effect(example: Example) -> Iterator[str]:
    gradients = example.losses
    if gradients is None:
        gradients = {"gradient": example.grad}
    for name, gradient in gradients.items():
        yield f"  # {name}: {_numbers(gradient)}"
    if example.expect is not None:
        yield f"  # becomes: {_numbers(example.expect)}"
    elif example.record is not None:
        recorded = [f"{stat} {value:g}" for stat, value in example.record.items()]
        yield f"  # recorded: {', '.join(recorded)}"
    elif example.trips:
        yield "  # trips: yes"
    else:
        yield "  # trips: no"


def _numbers(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"
