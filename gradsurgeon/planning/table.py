"""The plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from gradsurgeon._name_ranges import fold_names
from gradsurgeon.errors import printable

if TYPE_CHECKING:
    from gradsurgeon.planning.plan import Plan

_SHOWN = 6
_TIED_SHOWN = 2
_MAX_CHAINS, _MAX_LINKS, _LAST_LINKS = 100, 20, 3
NOUNS = {"params": "parameter", "modules": "module", "tensors": "tag"}


def render(plan: Plan) -> str:
    """Return the table: rules with what they bind, then the chain per tensor, then warnings."""
    manifest = plan.manifest
    head = (
        f"plan: {printable(plan.rules.file)} on {printable(plan.subject)}: "
        f"{count(len(plan.rules.rules), 'rule')}, {count(len(manifest.params), 'parameter')}, "
        f"{count(manifest.elements, 'element')}"
    )
    return "\n".join([head, "", *_rules(plan), "", *_chains(plan), *_warnings(plan)])


def count(number: int, noun: str) -> str:
    """Return ``3 rules`` or ``1 rule``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def grid(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[str]:
    """Yield lines with the cells of each column aligned, those in ``right`` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _rules(plan: Plan) -> Iterator[str]:
    rows = [("rule", "action", "at", "hook", "binds", "elements", "steps")]
    for rule in plan.rules.rules:
        bound = plan.of(rule.id)
        dormant = sum(binding.dormant for binding in bound)
        # Not `frozen`: that would be taken for the work of a rule with the action `freeze`.
        frozen = f" ({dormant} without requires_grad)" if dormant else ""
        steps = rule.steps
        last = "" if steps.to is None else steps.to - 1  # a range names its last number everywhere
        window = "" if (steps.from_, steps.to) == (0, None) else f"{steps.from_}..{last}"
        every = f" every {steps.every}" if steps.every > 1 else ""
        rows.append(
            (
                rule.id,
                rule.action,
                rule.point,
                bound[0].hook if bound else "-",
                f"{count(len(bound), NOUNS[rule.target])}{frozen}",
                f"{sum(binding.numel for binding in bound):,}" if rule.target == "params" else "-",
                f"{window}{every}".strip() or "all",
            )
        )
    yield from grid(rows, right=frozenset({4, 5}))


def _chains(plan: Plan) -> Iterator[str]:
    """Yield each distinct chain of effects with the tensors that go through it."""
    if not plan.chains:
        yield "no rule binds anything"
        return
    points = {rule.id: rule.point for rule in plan.rules.rules}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, chain in plan.chains.items():
        groups.setdefault(chain, []).append(name)
    untouched = sum(param.name not in plan.chains for param in plan.manifest.params)
    yield "effects per tensor, in order of effect"
    aliases = {param.name: param.aliases for param in plan.manifest.params}
    for chain, names in islice(groups.items(), _MAX_CHAINS):
        yield "  " + " -> ".join(_links(chain, points))
        noun = "parameter" if names[0] in aliases else "tensor"
        yield f"      {count(len(names), noun)}: {abridged(names, aliases)}"
    if len(groups) > _MAX_CHAINS:
        rest = sum(map(len, islice(groups.values(), _MAX_CHAINS, None)))
        more = count(len(groups) - _MAX_CHAINS, "more chain")
        yield f"  and {more}, of {count(rest, 'tensor')}: `plan --format json` has all of them"
    if untouched:
        yield f"  no rule: {count(untouched, 'parameter')}"


def _links(chain: Sequence[str], points: Mapping[str, str]) -> Iterator[str]:
    """Yield the rules of a chain, those in the middle of a long one as their number."""
    folded = len(chain) - _MAX_LINKS
    for place, rule in enumerate(chain):
        if folded <= 0 or place < _MAX_LINKS - _LAST_LINKS or place >= len(chain) - _LAST_LINKS:
            yield f"{rule} (at {points[rule]})"
        elif place == _MAX_LINKS - _LAST_LINKS:
            yield f"({folded} more)"


def abridged(names: Sequence[str], aliases: dict[str, tuple[str, ...]]) -> str:
    """Return the names with runs of equal layers folded: ``h.{0..11}.attn.weight``."""
    shown = []
    for text, members in fold_names(names).items():
        tied = [alias for name in members for alias in aliases.get(name, ())]
        ellipsis = ", ..." if len(tied) > _TIED_SHOWN else ""
        suffix = f" (tied to {', '.join(tied[:_TIED_SHOWN])}{ellipsis})" if tied else ""
        shown.append(printable(text + suffix))
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _warnings(plan: Plan) -> Iterator[str]:
    lines = [
        f"  {rule.id}: {text}"
        for rule in plan.rules.rules
        for text in plan.rule_warnings.get(rule.id, ())
    ]
    lines += [f"  {text}" for text in plan.warnings]
    if lines:
        yield ""
        yield "to know"
        yield from lines
