"""Which rule of the new file is which rule of the old one: by id, and by what it says."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gradsurgeon.actions import Rule
from gradsurgeon.review.effects import Effects
from gradsurgeon.review.fields import SELECTION, Field, canonical, compare, given

_ALIKE = 0.5  # of what two rules match together, what both do
_MAX_LOOKS = 1_000_000  # at pairs of rules, and at the names that both may match


@dataclass(frozen=True)
class Pairing:
    """The rules on both sides: ``names`` leads from old ids to new ones, ``old`` back."""

    before: Effects
    after: Effects
    names: Mapping[str, str]
    old: Mapping[str, str]

    def fields(self, was: str, new: str) -> tuple[Field, ...]:
        """Return what differs between two rules, or all that a rule gives which has no partner."""
        if was and new:
            return compare(self.before.rules[was], self.after.rules[new])
        if new:
            data = given(self.after.rules[new])
            return tuple(Field(key, None, value) for key, value in data.items() if key != "action")
        data = given(self.before.rules[was])
        return tuple(Field(key, value, None) for key, value in data.items() if key != "action")


def pair(before: Effects, after: Effects) -> Pairing:
    """Return which rules are the same, under one id or under two.

    A rule under another id was most likely renamed where it is the same otherwise; or where what it acts
    on stayed, or what it does stayed and most of what it acts on, too. The last is looked for among so
    many pairs only: in a huge file, rules beyond are removed ones and added ones.
    """
    names = {one: one for one in before.rules if one in after.rules}
    gone = {one: _looks(rule) for one, rule in before.rules.items() if one not in names}
    come = {one: _looks(rule) for one, rule in after.rules.items() if one not in before.rules}
    for found in (_alike(gone, come, 3), _alike(gone, come, 2), _near(gone, come, before, after)):
        names.update(found)
    return Pairing(before, after, names, {new: was for was, new in names.items()})


class _Looks(NamedTuple):
    """What makes a rule known again: the first parts of this are compared, or all."""

    head: Hashable
    selection: Hashable
    rest: Hashable


def _looks(rule: Rule) -> _Looks:
    parts: tuple[set[Hashable], set[Hashable]] = (set(), set())
    for item in canonical(rule).items():
        parts[item[0].partition(".")[0] not in SELECTION].add(item)
    head = (rule.action, rule.target, str(rule.ref))
    return _Looks(head, frozenset(parts[0]), frozenset(parts[1]))


def _alike(
    gone: dict[str, _Looks], come: dict[str, _Looks], parts: int
) -> Iterator[tuple[str, str]]:
    """Yield the old and the new id of rules of which some parts are equal, and take them out."""
    found: dict[tuple[Hashable, ...], list[str]] = {}
    for new in reversed(come):
        found.setdefault(come[new][:parts], []).append(new)
    for was in list(gone):
        if ids := found.get(gone[was][:parts]):
            del gone[was], come[ids[-1]]
            yield was, ids.pop()


def _near(
    gone: dict[str, _Looks], come: dict[str, _Looks], before: Effects, after: Effects
) -> Iterator[tuple[str, str]]:
    """Yield the old and the new id of rules that do the same to mostly the same tensors."""
    left = _MAX_LOOKS
    for was, looks in gone.items():
        first = before.matches[was].members
        for new, other in come.items():
            left -= 1
            if left < 0:
                return
            if (looks.head, looks.rest) != (other.head, other.rest):
                continue
            second = after.matches[new].members
            left -= min(len(first), len(second))
            both = len(first & second)
            if both and both >= _ALIKE * (len(first) + len(second) - both):
                del come[new]
                yield was, new
                break
