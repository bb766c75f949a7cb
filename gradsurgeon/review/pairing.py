"""Which rule of the new file is which rule of the old one: by id, and by what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradsurgeon.actions import Rule
from gradsurgeon.review.effects import Effects
from gradsurgeon.review.fields import SELECTION, Field, compare, given

_ALIKE = 0.5  # of what two rules match together, what both do


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
    """Return which rules are the same, under one id or under two."""
    names = {one: one for one in before.rules if one in after.rules}
    for exact in (True, False):
        for was, rule in before.rules.items():
            if was in names:
                continue
            for new, other in after.rules.items():
                if new in names.values() or new in before.rules:
                    continue
                if _same(rule, other) if exact else _alike(rule, other, before, after):
                    names[was] = new
                    break
    return Pairing(before, after, names, {new: was for was, new in names.items()})


def _same(old: Rule, new: Rule) -> bool:
    return not compare(old, new)


def _alike(old: Rule, new: Rule, before: Effects, after: Effects) -> bool:
    """Tell whether a rule was most likely renamed: either what it acts on stayed, or what it does."""
    if (old.action, old.target, old.ref) != (new.action, new.target, new.ref):
        return False
    differing = {field.name.partition(".")[0] for field in compare(old, new)}
    if differing.isdisjoint(SELECTION):
        return True
    if not differing <= set(SELECTION):
        return False
    first, second = before.matches[old.id].members, after.matches[new.id].members
    return bool(first & second) and len(first & second) >= _ALIKE * len(first | second)
