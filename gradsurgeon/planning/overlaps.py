"""Rules of a plan that meet on the same tensors, and what a reader must know of their order. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Literal

from gradsurgeon.actions import MOMENTS, CaptureRule, EditRule, Moment, ObserverRule, Rule
from gradsurgeon.errors import printable
from gradsurgeon.planning.plan import Plan

_SHOWN = 50
# What decides whether a pair of rules is worth a word: what they do to gradients, and when. A trap asks at
# its own fixed moment, and a freeze changes no gradient: their place is no surprise.
_Kind = tuple[Literal["edits", "reads", ""], Moment]


def overlaps(plan: Plan) -> Iterator[str]:
    """Yield warnings on rules that change the same tensors; of many pairs the first, in file order."""
    names = cache(lambda rule_id: {binding.name for binding in plan.of(rule_id)})
    pairs = _pairs(plan)
    for first, second in islice(pairs, _SHOWN):
        yield _warning(plan, first, second, names(first.id) & names(second.id))
    if next(pairs, None) is not None:
        yield (
            "and more pairs of rules like these: `plan --format json` has every tensor with all rules "
            "that meet on it"
        )


def _pairs(plan: Plan) -> Iterator[tuple[Rule, Rule]]:
    """Yield each pair that is worth a word, in time that grows with these and not with all pairs."""
    rules = plan.rules.rules
    groups = _groups(plan)
    among: dict[int, list[dict[_Kind, list[int]]]] = {}
    for group in groups:
        for members in group.values():
            for number in members:
                among.setdefault(number, []).append(group)
    for number, rule in enumerate(rules):
        later: set[int] = set()
        for group in among.get(number, ()):
            for kind, members in group.items():
                if _is_worth_a_word(_kind(rule), kind):
                    later.update(members[bisect_right(members, number) :])
        yield from ((rule, rules[other]) for other in sorted(later))


def _groups(plan: Plan) -> list[dict[_Kind, list[int]]]:
    """Return the rules that meet on some tensor, by their kind; each combination once."""
    meeting: dict[tuple[str, str | None, str], list[int]] = {}
    for number, rule in enumerate(plan.rules.rules):
        tensor = None if rule.target == "params" else rule.tensor
        for binding in plan.of(rule.id):
            meeting.setdefault((rule.target, tensor, binding.name), []).append(number)
    groups = []
    for numbers in dict.fromkeys(map(tuple, meeting.values())):
        group: dict[_Kind, list[int]] = {}
        for number in numbers if len(numbers) > 1 else ():
            group.setdefault(_kind(plan.rules.rules[number]), []).append(number)
        groups.append(group)
    return groups


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
