from collections.abc import Iterator

from gradsurgeon.actions import EditRule
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.checks._shared import one_is_moot
from gradsurgeon.review.lint_context import LintContext, listed


class OverlappingEdits(Check):
    """Two rules change the same tensors.

    ## What it finds
    Rules that certainly change a tensor in the same step. Where the names of a model are known, that
    is exact. Otherwise it is said where a pattern of one rule is `*`, is a pattern of the other rule as
    well, or matches a name that the other rule gives without wildcards.

    ## Why it matters
    Every rule that matches applies; there is no "last match wins". The second one sees what the first
    one has left.

    ## What to do
    If both are meant, nothing. Otherwise leave the names of one rule out of the other by `exclude`.
    """

    severity = "note"
    GOOD = """
- id: gentle-head
  action: scale
  params: "head.*"
  factor: 0.5

- id: gentle-rest
  action: scale
  params: "*"
  exclude: "head.*"
  factor: 0.1
"""
    BAD = """
- id: gentle-head
  action: scale
  params: "head.*"
  factor: 0.5

- id: gentle-rest
  action: scale
  params: "*"
  factor: 0.1
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, above in context.pairs():
            if not isinstance(rule, EditRule):
                continue
            others = tuple(
                other
                for other in above
                if isinstance(other, EditRule)
                and not one_is_moot(context, rule, other)
                and context.overlap(other, rule)
            )
            if others:
                change = f"change{'s' * (len(others) == 1)}"
                message = f"it changes tensors that {listed(others)} {change} as well"
                hint = "both apply, one after the other: if one is enough, use `exclude`"
                yield Finding(rule, (rule.target,), message, hint, others)
