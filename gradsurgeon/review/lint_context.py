"""Answers to the questions of checks: which tensors a rule selects, which of two acts first, where they overlap."""

from functools import cache
from itertools import accumulate

from gradsurgeon.actions import Rule, Where, in_order
from gradsurgeon.match import contains, disjoint
from gradsurgeon.planning import ROOT, Manifest, MatchedRules, Matcher
from gradsurgeon.schema import RuleSet

# Rules are compared in pairs, pattern by pattern, and a file may hold thousands of rules.
MAX_COMPARED = 400


class LintContext:
    def __init__(self, rules: RuleSet, manifest: Manifest | None = None) -> None:
        self.rules = rules.rules
        self.matched = None if manifest is None else MatchedRules(rules, Matcher(manifest))
        self._is_within = cache(frozenset[str].issubset)
        self._place = {rule.id: place for place, rule in enumerate(in_order(self.rules))}
        sizes = accumulate(len(rule.patterns) + len(rule.exclude) for rule in self.rules)
        # The rules that are compared with each other: all of them, except in a huge file.
        self.compared = self.rules[: sum(total <= MAX_COMPARED for total in sizes)]

    def selected(self, rule: Rule) -> frozenset[str] | None:
        """Return the names that a rule selects; ``None`` if names are unknown."""
        if self.matched is None or rule.target == "tensors":
            return None
        return self.matched.matches[rule.id].members

    def acts_before(self, first: Rule, second: Rule) -> bool:
        return self._place[first.id] < self._place[second.id]

    def overlap(self, first: Rule, second: Rule) -> bool:
        """Tell whether two rules certainly act on one tensor in one step.

        Without names this is certain if one rule selects all that a pattern of the other matches.
        """
        if (first.target, first.ref) != (second.target, second.ref):
            return False
        names, others = self.selected(first), self.selected(second)
        if names is not None and others is not None:
            shared = not names.isdisjoint(others)
        else:
            shared = any(_selects_all_of(first, second, text) for text in second.patterns) or any(
                _selects_all_of(second, first, text) for text in first.patterns
            )
        return shared and first.steps.meets(second.steps)

    def covers(self, wide: Rule, narrow: Rule) -> bool:
        """Tell whether ``wide`` certainly acts on every tensor of ``narrow``, in every step of ``narrow``."""
        if (wide.target, wide.ref) != (narrow.target, narrow.ref):
            return False
        if wide.when not in (None, narrow.when) or not wide.steps.includes(narrow.steps):
            return False
        names, wider = self.selected(narrow), self.selected(wide)
        if names is not None and wider is not None:
            return bool(names) and self._is_within(names, wider)
        return all(_selects_all_of(wide, narrow, text) for text in narrow.patterns)


def _selects_all_of(wide: Rule, narrow: Rule, text: str) -> bool:
    """Tell whether ``wide`` selects every name that ``narrow`` selects by ``text``, one of its patterns."""
    if not any(_contains(wide, pattern, text) for pattern in wide.patterns):
        return False
    # Each condition of the wide rule is also a condition of the narrow one.
    if wide.where not in (Where(), narrow.where) or wide.model not in (None, narrow.model):
        return False
    return all(
        any(_contains(narrow, left_out, out) for left_out in narrow.exclude) or disjoint(out, text)
        for out in wide.exclude
    )


def _contains(rule: Rule, wide: str, narrow: str) -> bool:
    # Only the pattern "." matches the root.
    if rule.target == "modules" and ROOT in (wide, narrow):
        return wide == narrow
    return contains(wide, narrow)
