"""Which rule of the new file is which rule of the old one: by id, and by what it says."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from gradsurgeon.actions import Rule
from gradsurgeon.review.matched_rules import MatchedRules
from gradsurgeon.review.option_changes import (
    SELECTION,
    OptionChange,
    changed_options,
    comparable_options,
    given_options,
)

# Action, selection and all the rest: what a rule is recognised by under another id.
_Traits = tuple[Hashable, Hashable, Hashable]


@dataclass(frozen=True)
class RulePairs:
    """The rules of both sides: ``new_ids`` leads from old ids to new ones, ``old_ids`` back."""

    before: MatchedRules
    after: MatchedRules
    new_ids: Mapping[str, str]
    old_ids: Mapping[str, str]

    def option_changes(self, old: str, new: str) -> tuple[OptionChange, ...]:
        """Return the options that differ, or all options of a rule that was added or removed."""
        if old and new:
            return changed_options(self.before.rules[old], self.after.rules[new])
        rule = self.after.rules[new] if new else self.before.rules[old]
        options = {key: value for key, value in given_options(rule).items() if key != "action"}
        if new:
            return tuple(OptionChange(key, None, value) for key, value in options.items())
        return tuple(OptionChange(key, value, None) for key, value in options.items())


def pair_rules(before: MatchedRules, after: MatchedRules) -> RulePairs:
    """Return which rule of the new file is which of the old one, under the same id or another.

    A rule under another id was most likely renamed where it is the same otherwise, or where at least its
    action and its selection are written the same.
    """
    new_ids = {rule: rule for rule in before.rules if rule in after.rules}
    gone = {key: _traits(rule) for key, rule in before.rules.items() if key not in after.rules}
    come = {key: _traits(rule) for key, rule in after.rules.items() if key not in before.rules}
    new_ids.update(_pair_equal(gone, come, traits=3))
    new_ids.update(_pair_equal(gone, come, traits=2))
    return RulePairs(before, after, new_ids, {new: old for old, new in new_ids.items()})


def _traits(rule: Rule) -> _Traits:
    options = comparable_options(rule)
    selection = {item for item in options.items() if item[0].partition(".")[0] in SELECTION}
    kind = (rule.action, rule.target, str(rule.ref))
    return kind, frozenset(selection), frozenset(options.items() - selection)


def _pair_equal(
    gone: dict[str, _Traits], come: dict[str, _Traits], traits: int
) -> Iterator[tuple[str, str]]:
    """Yield old and new id of rules whose first traits are equal, and remove them from both sides."""
    same: dict[tuple[Hashable, ...], list[str]] = {}
    for new in reversed(come):
        same.setdefault(come[new][:traits], []).append(new)
    for old in list(gone):
        if ids := same.get(gone[old][:traits]):
            del gone[old], come[ids[-1]]
            yield old, ids.pop()
