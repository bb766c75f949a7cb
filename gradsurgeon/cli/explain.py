"""``gradsurgeon explain``: the page of an action or a check, built from its class. Never imports torch."""

import argparse
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gradsurgeon.actions import Example, Rule, TargetKind, known_actions, written
from gradsurgeon.cli import fail
from gradsurgeon.cli.options import add_import
from gradsurgeon.cli.review.checks import CHECKS
from gradsurgeon.cli.review.formats import all_checks
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
    "tensors": {"tensors": "*"},
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
        rows = [(action, summary_of(rule)) for action, rule in known_actions.items()]
        rows += [(check, checks[check].summary) for check in sorted(checks)]
        width = max(len(row[0]) for row in rows)
        for row in rows:
            print(f"{row[0].ljust(width)}  {row[1]}")
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
            hint = "without a name: a list of all"
        return fail(f"unknown action or check `{printable(name[:60])}` ({hint})")
    for line in page:
        if line.startswith(("|", " ")):
            print(line)
        else:
            print(textwrap.fill(line, _WIDTH))
    return 0


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
        yield from options_table(own_options)
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
    yield from _rule_file([f"- {rule}" for rule in check.bad])


def _sections(rule: type[Rule]) -> Iterator[str]:
    for section in inspect.cleandoc(rule.__doc__ or "").split("\n## ")[1:]:
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
    default = "no default" if rule.needs_at else f"`{rule.points[0]}` by default"
    return f"Acts on {targets}; on parameters at {points} ({default})."


def options_table(options: Iterable[tuple[type[Rule], str]]) -> Iterator[str]:
    """Yield the lines of a table of options; keys of mappings have their own lines."""
    rows = [("option", "type", "default", "meaning")]
    for rule, key in options:
        branch = rule_schema(rule)
        info = branch["properties"][key]
        rows.append((f"`{key}`", _type(info), _needed(rule, key, branch), _meaning(info)))
        for name, part in info.get("properties", {}).items():
            rows.append((f"`{name}` in `{key}`", _type(part), _default(info, name), _meaning(part)))
    yield from table(rows)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield "|---" * len(row) + "|"


def keys(rule: type[Rule], *, shared: bool) -> list[str]:
    """Return the own options of an action, or the options that every rule shares."""
    options = rule_schema(rule)["properties"]
    chosen = []
    for key in options:
        is_shared = key in _SHARED
        if key != "action" and is_shared is shared:
            chosen.append(key)
    return chosen


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
    if "enum" in info.get("items", {}):
        return f"{description} Any of: {', '.join(info['items']['enum'])}."
    return description


def _needed(rule: type[Rule], key: str, branch: Mapping[str, Any]) -> str:
    """Return when an option must be given, if that depends on others, else its default."""
    if key in rule.targets and len(rule.targets) > 1:
        return f"one of {len(rule.targets)}"
    if key == "tensor" and "modules" in rule.targets:
        return "needed with modules"
    needs: dict[TargetKind, str] = dict(rule.needs)
    if rule.needs_at:
        needs["params"] = "at"
    for target, option in needs.items():
        if key == option:
            return f"needed with {target}"
    return _default(branch, key)


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
        yield f"  {line}"
    yield "```"


def _examples(rule: type[Rule]) -> Iterator[str]:
    """Yield the examples of an action as rules, each with its effect as comments."""
    # No single gradient can show the effect of some actions.
    examples: Sequence[Example | Mapping[str, str]] = rule.EXAMPLES
    if not examples:
        examples = [_TARGET_EXAMPLES[target] for target in rule.targets]
    for number, example in enumerate(examples, 1):
        shown: dict[str, Any] = {"id": f"example-{number}", "action": rule.name()}
        if isinstance(example, Example):
            yield f"- {written({**shown, 'params': '*', **example.options})}"
            yield from _effect(example)
        else:
            yield f"- {written({**shown, **example})}"


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
    else:
        yield f"  # trips: {written(example.trips)}"


def _numbers(values: Sequence[float]) -> str:
    numbers = [f"{value:g}" for value in values]
    return f"[{', '.join(numbers)}]"
