"""Answers to the questions of checks: which of two rules acts first, and whether they certainly overlap."""

from itertools import accumulate

from gradsurgeon.actions import Rule, Steps, Where, in_order
from gradsurgeon.match import contains, disjoint
from gradsurgeon.planning import ROOT
from gradsurgeon.schema import RuleSet

# Rules are compared in pairs, pattern by pattern, and a file may hold thousands of rules.
MAX_COMPARED = 400


class LintContext:
    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules.rules
        self._place = {rule.id: place for place, rule in enumerate(in_order(self.rules))}
        sizes = accumulate(len(rule.patterns) + len(rule.exclude) for rule in self.rules)
        # The rules that are compared with each other: all of them, except in a huge file.
        self.compared = self.rules[: sum(total <= MAX_COMPARED for total in sizes)]

    def acts_before(self, first: Rule, second: Rule) -> bool:
        return self._place[first.id] < self._place[second.id]

    def overlap(self, first: Rule, second: Rule) -> bool:
        """Tell whether two rules certainly act on one tensor in one step.

        It is certain if one rule selects all that a pattern of the other matches.
        """
        if (first.target, first.ref) != (second.target, second.ref):
            return False
        shared = any(_selects_all_of(first, second, text) for text in second.patterns) or any(
            _selects_all_of(second, first, text) for text in first.patterns
        )
        return shared and first.steps.meets(second.steps)

    def covers(self, wide: Rule, narrow: Rule) -> bool:
        """Tell whether ``wide`` certainly acts on every tensor of ``narrow``, in every step of ``narrow``."""
        if (wide.target, wide.ref) != (narrow.target, narrow.ref):
            return False
        if wide.when not in (None, narrow.when) or wide.steps not in (Steps(), narrow.steps):
            return False
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
