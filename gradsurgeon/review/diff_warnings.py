"""The warnings about a change of rules that a reviewer must not miss."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from gradsurgeon.actions import TrapRule
from gradsurgeon.review.matched_rules import ChainChange, Flaw
from gradsurgeon.review.rule_changes import RulePairs

Kind = Literal[
    "lost-protection",  # parameters that no rule protects any more
    "lost-trap",  # tensors that lost a trap, and that other rules still protect
    "weaker-trap",  # tensors whose trap does less than before
    "no-match",  # a rule that newly matches nothing
    "expect",  # a rule that newly breaks its `expect`
    "cannot-act",  # a rule that newly cannot act
    "order",  # tensors whose rules take effect in another order
]


class DiffWarning(NamedTuple):
    kind: Kind
    rules: tuple[str, ...] = ()  # ids, several in order of effect
    names: tuple[str, ...] = ()  # of parameters, or of tensors as in the chains
    detail: str = ""  # the reason in words; for an ``expect`` the numbers


def warnings(
    pairs: RulePairs, chains: Sequence[ChainChange], lost: Sequence[str]
) -> Iterator[DiffWarning]:
    """Yield the warnings, the worst first, without those that were true before the change."""
    before, after = pairs.before, pairs.after
    for rule in after.rules:
        old = pairs.old_ids.get(rule)
        # A rule that matched nothing before is no news, whatever its pattern.
        known = {_key(flaw) for flaw in before.flaws(old)} if old else set()
        for flaw in after.flaws(rule):
            if _key(flaw) not in known:
                yield DiffWarning(flaw.kind, (rule,), detail=flaw.text)
    if lost:
        yield DiffWarning("lost-protection", names=tuple(lost))
    yield from _traps(pairs, frozenset(lost))
    # Many tensors share few distinct chains.
    sides = {(chain.before, chain.after) for chain in chains}
    reordered = {side for side in sides if _is_reordered(*side, pairs.new_ids)}
    if names := [chain.name for chain in chains if (chain.before, chain.after) in reordered]:
        ids = [rule for rule in after.rules if rule in pairs.old_ids]
        yield DiffWarning("order", tuple(ids), tuple(names))


def _key(flaw: Flaw) -> tuple[str, str]:
    return flaw.kind, "" if flaw.kind == "no-match" else flaw.text


def _traps(pairs: RulePairs, lost: Collection[str]) -> Iterator[DiffWarning]:
    """Yield the traps that check fewer tensors than before, or let more through."""
    names: dict[tuple[Kind, str, str], list[str]] = {}

    @cache  # many tensors share few distinct chains
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
    """Return how the present traps of one action do less than an old trap; ``None`` if they do not."""
    if not traps:
        return "lost-trap", old.action
    acting = [trap for trap in traps if trap.then != "warn" or old.then == "warn"]
    if not acting:
        return "weaker-trap", "only warns now"
    if not any(trap.steps.includes(old.steps) for trap in acting):
        return "weaker-trap", "acts in fewer or other steps"
    return None


def _is_reordered(
    before: tuple[str, ...], after: tuple[str, ...], new_ids: Mapping[str, str]
) -> bool:
    """Tell whether the rules that a tensor keeps take effect in another order now."""
    there = set(after)
    kept = [new_ids[rule] for rule in before if new_ids.get(rule) in there]
    both = set(kept)
    return kept != [rule for rule in after if rule in both]
