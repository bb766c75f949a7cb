"""What a reviewer must not miss about a change of rules."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Literal, NamedTuple

from gradsurgeon.actions import Rule, TrapRule
from gradsurgeon.review.matched_rules import ChainChange, MatchedRules
from gradsurgeon.review.rule_changes import RulePairs

Kind = Literal[
    "lost-protection",  # of parameters
    "lost-trap",  # these two: of tensors that other rules still protect
    "weaker-trap",
    "no-match",  # these three: of a rule that did not have it before
    "expect",
    "cannot-act",
    "overlap",  # of two rules that newly change the same tensors
    "more-overlaps",  # than are listed
    "order",  # of effects
]
_MAX_OVERLAPS = 500  # pairs of rules: who reads on knows enough


class DiffWarning(NamedTuple):
    kind: Kind
    rules: tuple[str, ...] = ()  # ids, in order of effect where there are two
    names: tuple[str, ...] = ()  # of parameters or modules
    detail: str = ""  # why, in words; of an overlap the moments, of an ``expect`` the numbers


def warnings(
    pairs: RulePairs, chains: Sequence[ChainChange], lost: Sequence[str]
) -> Iterator[DiffWarning]:
    """Yield the warnings, the worst first. What was just as wrong before is left out."""
    before, after = pairs.before, pairs.after
    for rule in after.rules:
        old = pairs.old_ids.get(rule)
        known = set(_flaws(before, old)) if old else set()
        for kind, detail in _flaws(after, rule):
            if (kind, detail) not in known:
                yield DiffWarning(kind, (rule,), detail=detail or after.no_match(rule))
    if lost:
        yield DiffWarning("lost-protection", names=tuple(lost))
    yield from _traps(pairs, frozenset(lost))
    yield from _overlaps(pairs)
    # Few distinct chains stand for many tensors.
    sides = {(chain.before, chain.after) for chain in chains}
    reordered = {side for side in sides if _is_reordered(*side, pairs.new_ids)}
    if names := [chain.name for chain in chains if (chain.before, chain.after) in reordered]:
        ids = [rule for rule in after.rules if rule in pairs.old_ids]
        yield DiffWarning("order", tuple(ids), tuple(names))


def _flaws(matched: MatchedRules, rule: str) -> Iterator[tuple[Kind, str]]:
    if matched.has_no_match(rule):
        yield "no-match", ""  # with whatever pattern
    for text in matched.obstacles(rule):
        yield "cannot-act", text
    expect = matched.rules[rule].expect
    if expect is not None and matched.breaks_expect(rule):
        yield "expect", f"expects {expect.params}, matches {len(matched.matches[rule].names)}"


def _traps(pairs: RulePairs, lost: Collection[str]) -> Iterator[DiffWarning]:
    """Yield the traps that look at fewer tensors than before, or let more through."""
    names: dict[tuple[Kind, str, str], list[str]] = {}

    @cache  # few distinct chains stand for many tensors
    def weakened(old: tuple[str, ...], new: tuple[str, ...]) -> list[tuple[Kind, str, str]]:
        traps = [rule for one in new if isinstance(rule := pairs.after.rules[one], TrapRule)]
        return [
            (*found, rule.id)
            for one in old
            if isinstance(rule := pairs.before.rules[one], TrapRule)
            and (found := _weakened(rule, [trap for trap in traps if trap.action == rule.action]))
        ]

    for name, chain in pairs.before.chains.items():
        for found in weakened(chain, pairs.after.chains.get(name, ())) if name not in lost else ():
            names.setdefault(found, []).append(name)
    for (kind, detail, rule), concerned in names.items():
        yield DiffWarning(kind, (pairs.new_ids.get(rule, rule),), tuple(concerned), detail)


def _weakened(old: TrapRule, traps: Sequence[TrapRule]) -> tuple[Kind, str] | None:
    """Tell whether the traps of one action that a tensor has now do less than an old one did, and in what."""
    if not traps:
        return "lost-trap", old.action
    acting = [trap for trap in traps if trap.then != "warn" or old.then == "warn"]
    if not acting:
        return "weaker-trap", "only warns now"
    if not any(trap.steps.includes(old.steps) for trap in acting):
        return "weaker-trap", "acts in fewer or other steps"
    return None


def _overlaps(pairs: RulePairs) -> Iterator[DiffWarning]:
    """Yield the pairs of rules that change tensors which they did not both change before."""
    before, after = pairs.before, pairs.after
    new = set(islice(_new_overlaps(pairs), _MAX_OVERLAPS + 1))
    position = {rule: at for at, rule in enumerate(after.rules)}
    ordered = sorted(new, key=lambda ids: (position[ids[0]], position[ids[1]]))
    for ids in ordered[:_MAX_OVERLAPS]:
        rules = [after.rules[rule] for rule in ids]
        first, second = (after.matches[rule] for rule in ids)
        shared = first.members & second.members
        olds = [before.rules[pairs.old_ids[rule]] for rule in ids if rule in pairs.old_ids]
        if len(olds) == len(ids) and _edit_same_tensors(*olds):
            shared -= before.matches[olds[0].id].members & before.matches[olds[1].id].members
        rules.sort(key=lambda rule: rule.order)
        # Mostly it is all that the first one matches: ten thousand names are not copied per pair.
        every = len(shared) == len(first.names)
        names = first.names if every else tuple(name for name in first.names if name in shared)
        detail = ", then ".join(f"at {rule.point}" for rule in rules)
        yield DiffWarning("overlap", tuple(rule.id for rule in rules), names, detail)
    if len(new) > _MAX_OVERLAPS:
        yield DiffWarning("more-overlaps", detail=f"over {_MAX_OVERLAPS} pairs")


def _new_overlaps(pairs: RulePairs) -> Iterator[tuple[str, str]]:
    """Yield, once each and the upper rule first, the ids of two rules that newly change the same tensors.

    Tensors that go through the same rules are looked at together, and of their rules only those that are
    new there, each with all the others: what was together before is not looked at pair by pair.
    """
    before, after = pairs.before, pairs.after
    position = {rule: at for at, rule in enumerate(after.rules)}
    chains = ((before.chains.get(name, ()), chain) for name, chain in after.chains.items())
    seen = set()
    for old, new in dict.fromkeys(chains):
        known = {pairs.new_ids.get(rule) for rule in old if before.rules[rule].edits}
        edits = [rule for rule in new if after.rules[rule].edits]
        edits.sort(key=position.__getitem__)
        for other in (rule for rule in edits if rule not in known):
            for rule in edits:
                upper_first = position[rule] < position[other]
                overlap = (rule, other) if upper_first else (other, rule)
                if rule != other and overlap not in seen:
                    seen.add(overlap)
                    yield overlap


def _edit_same_tensors(first: Rule, second: Rule) -> bool:
    """Tell whether two rules would change the same tensors if they matched the same names."""
    return first.edits and second.edits and (first.target, first.ref) == (second.target, second.ref)


def _is_reordered(
    before: tuple[str, ...], after: tuple[str, ...], new_ids: Mapping[str, str]
) -> bool:
    """Tell whether the rules that a tensor keeps now take effect in another order."""
    there = set(after)
    kept = [new_ids[rule] for rule in before if new_ids.get(rule) in there]
    both = set(kept)
    return kept != [rule for rule in after if rule in both]
