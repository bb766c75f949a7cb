"""Rules of a plan that meet on the same tensors, and what a reader must know of their order. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, combinations, islice
from typing import Literal

from gradsurgeon.actions import MOMENTS, CaptureRule, EditRule, Moment, ObserverRule, Rule
from gradsurgeon.errors import printable
from gradsurgeon.planning.plan import Plan

_SHOWN, _LOOKED_AT = 50, 500_000
# What decides whether a pair of rules is worth a word: what they do to gradients, and when. A trap asks at
# its own fixed moment, and a freeze changes no gradient: their place is no surprise.
_Kind = tuple[Literal["edits", "reads", ""], Moment]


def overlaps(plan: Plan) -> Iterator[str]:
    """Yield warnings on rules that change the same tensors; of many pairs some, in file order."""
    names = cache(lambda rule_id: {binding.name for binding in plan.of(rule_id)})
    rules = plan.rules.rules
    meeting: dict[tuple[str, str | None, str], list[int]] = {}
    for number, rule in enumerate(rules):
        tensor = None if rule.target == "params" else rule.tensor
        for binding in plan.of(rule.id):
            meeting.setdefault((rule.target, tensor, binding.name), []).append(number)
    distinct = dict.fromkeys(map(tuple, meeting.values()))
    pairs = chain.from_iterable(combinations(numbers, 2) for numbers in distinct)
    kinds = [_kind(rule) for rule in rules]
    found = sorted(
        {
            (first, second)
            for first, second in islice(pairs, _LOOKED_AT)
            if _is_worth_a_word(kinds[first], kinds[second])
        }
    )
    for number, other in found[:_SHOWN]:
        first, second = rules[number], rules[other]
        yield _warning(plan, first, second, names(first.id) & names(second.id))
    if len(found) > _SHOWN or next(pairs, None) is not None:
        yield (
            "and more pairs of rules like these: `plan --format json` has every tensor with all rules "
            "that meet on it"
        )


def _kind(rule: Rule) -> _Kind:
    if isinstance(rule, EditRule):
        return "edits", rule.point
    return "reads" if isinstance(rule, ObserverRule | CaptureRule) else "", rule.point


def _is_worth_a_word(earlier: _Kind, later: _Kind) -> bool:
    if earlier[0] == later[0] == "edits":
        return True
    crossed = MOMENTS.index(later[1]) < MOMENTS.index(earlier[1])
    return crossed and {earlier[0], later[0]} == {"edits", "reads"}


def _warning(plan: Plan, first: Rule, second: Rule, shared: set[str]) -> str:
    noun = first.target[:-1] if first.target != "params" else "parameter"
    order = sorted((first, second), key=lambda rule: MOMENTS.index(rule.point))
    example = next(binding.name for binding in plan.of(first.id) if binding.name in shared)
    what = f"{len(shared)} {noun}{'' if len(shared) == 1 else 's'} (e.g. {printable(example)})"
    if isinstance(first, EditRule) and isinstance(second, EditRule):
        return (
            f"{first.id} and {second.id} both change {what}; "
            f"effective order: {order[0].id} (at {order[0].point}), "
            f"then {order[1].id} (at {order[1].point})"
        )
    return (
        f"{second.id} (at {second.point}) comes before {first.id} (at {first.point}) on "
        f"{what}, although it stands later in the file"
    )
