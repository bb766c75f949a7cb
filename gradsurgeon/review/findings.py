"""What a reviewer must not miss about a change of rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from gradsurgeon.actions import MOMENTS, Rule

if TYPE_CHECKING:
    from gradsurgeon.review.difference import Chain
    from gradsurgeon.review.pairing import Pairing

Kind = Literal[
    "lost-protection", "no-match", "expect", "cannot-act", "overlap", "more-overlaps", "order"
]
_MAX_PAIRS = 500  # of rules: who reads on knows enough
_MAX_EXPLAINED = 20  # to look for the nearest names takes time for each
_UNEXPLAINED = f"the nearest names are told for the first {_MAX_EXPLAINED} such rules"


@dataclass(frozen=True, slots=True)
class Finding:
    """One consequence of the change.

    Attributes:
        kind: ``lost-protection`` of parameters; a rule that newly has ``no-match``, that newly
            breaks its ``expect``, or that newly ``cannot-act`` on what it matches; an ``overlap`` of
            two rules that newly change the same tensors, of which ``more-overlaps`` are not listed; an ``order`` of effects that changed.
        rules: ids of the rules in question, in order of effect where there are two.
        names: the parameters or modules in question.
        detail: why, in words; of an overlap the moments, of an ``expect`` the numbers.
    """

    kind: Kind
    rules: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        return {
            "kind": self.kind,
            "rules": list(self.rules),
            "names": list(self.names),
            "detail": self.detail,
        }


def findings(pairing: Pairing, chains: Sequence[Chain], lost: Sequence[str]) -> Iterator[Finding]:
    """Yield the findings, the worst first. What was so before is none."""
    before, after = pairing.before, pairing.after
    stray = 0
    for one, was in ((one, pairing.old.get(one)) for one in after.rules):
        if after.has_no_match(one) and not (was and before.has_no_match(was)):
            stray += 1
            few = stray <= _MAX_EXPLAINED
            yield Finding("no-match", (one,), (), after.no_match(one) if few else _UNEXPLAINED)
        if texts := after.obstacles(one):
            known = before.obstacles(was) if was else []
            for text in texts:
                if text not in known:
                    yield Finding("cannot-act", (one,), (), text)
        yield from _expect(pairing, one)
    if lost:
        yield Finding("lost-protection", (), tuple(lost))
    yield from _overlaps(pairing)
    # Few distinct chains stand for many tensors.
    sides = {(chain.before, chain.after) for chain in chains}
    turning = {both for both in sides if _turned(*both, pairing.names)}
    turned = [chain.name for chain in chains if (chain.before, chain.after) in turning]
    if turned:
        ids = [one for one in after.rules if one in pairing.old]
        yield Finding("order", tuple(ids), tuple(turned))


def _expect(pairing: Pairing, one: str) -> Iterator[Finding]:
    before, after, was = pairing.before, pairing.after, pairing.old.get(one)
    expect = after.rules[one].expect
    if expect is None or not after.breaks_expect(one):
        return
    found = len(after.matches[one].names)
    if was and before.breaks_expect(was):
        old = before.rules[was].expect
        if old == expect and len(before.matches[was].names) == found:
            return
    yield Finding("expect", (one,), (), f"expects {expect.params}, matches {found}")


def _overlaps(pairing: Pairing) -> Iterator[Finding]:
    """Yield the pairs of rules that change tensors which they did not both change before."""
    before, after = pairing.before, pairing.after
    found = set(islice(_meeting(pairing), _MAX_PAIRS + 1))
    at = {one: position for position, one in enumerate(after.rules)}
    for one, other in sorted(found, key=lambda ids: (at[ids[0]], at[ids[1]]))[:_MAX_PAIRS]:
        pair = (after.rules[one], after.rules[other])
        first, second = (after.matches[rule.id] for rule in pair)
        shared = first.members & second.members
        olds = [before.rules[pairing.old[rule.id]] for rule in pair if rule.id in pairing.old]
        if len(olds) == len(pair) and _together(*olds):
            shared -= before.matches[olds[0].id].members & before.matches[olds[1].id].members
        order = sorted(pair, key=lambda rule: MOMENTS.index(rule.point))
        # Mostly it is all that the first one matches: ten thousand names are not copied per pair.
        every = len(shared) == len(first.names)
        names = first.names if every else tuple(name for name in first.names if name in shared)
        detail = ", then ".join(f"at {rule.point}" for rule in order)
        yield Finding("overlap", tuple(rule.id for rule in order), names, detail)
    if len(found) > _MAX_PAIRS:
        yield Finding("more-overlaps", detail=f"over {_MAX_PAIRS} pairs")


def _meeting(pairing: Pairing) -> Iterator[tuple[str, str]]:
    """Yield, once and the upper one first, the ids of two rules where one newly changes what the other does.

    Tensors that go through the same rules are looked at together, and of their rules only those that are
    new there, each with all the others: what was together before is not looked at pair by pair.
    """
    before, after = pairing.before, pairing.after
    at = {one: position for position, one in enumerate(after.rules)}
    both = ((before.chains.get(name, ()), chain) for name, chain in after.chains.items())
    seen = set()
    for old, new in dict.fromkeys(both):
        was = {pairing.names.get(one) for one in old if before.rules[one].role == "edit"}
        edits = sorted((one for one in new if after.rules[one].role == "edit"), key=at.__getitem__)
        for other in (one for one in edits if one not in was):
            for one in edits:
                pair = (one, other) if at[one] < at[other] else (other, one)
                if one != other and pair not in seen:
                    seen.add(pair)
                    yield pair


def _together(first: Rule, second: Rule) -> bool:
    """Tell whether two rules would change the same tensors, did they match the same names."""
    return (
        first.role == second.role == "edit"
        and first.target == second.target
        and (first.target == "params" or first.tensor == second.tensor)
    )


def _turned(before: tuple[str, ...], after: tuple[str, ...], names: Mapping[str, str]) -> bool:
    """Tell whether the rules that a tensor keeps take effect in another order."""
    there = set(after)
    kept = [names[one] for one in before if names.get(one) in there]
    both = set(kept)
    return kept != [one for one in after if one in both]
