from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.checks._shared import moot
from gradsurgeon.review.lint_context import LintContext


class ShadowedRule(Check):
    """A rule has no effect, because another one zeroes or freezes all that it acts on.

    ## What it finds
    Edits of tensors that are certainly zero already, that are set to zero later, or that belong to
    frozen parameters, in every step in which the edit acts.

    ## Why it matters
    The rule looks as if it did something. Who removes the other one brings it to life.

    ## What to do
    Remove one of the two, or let them act on different names or in different `steps`.
    """

    GOOD = """
- id: no-bias-at-first
  action: zero
  params: "*.bias"
  steps: {from: 0, to: 100}

- id: gentle-bias
  action: scale
  params: "*.bias"
  factor: 0.1
  steps: {from: 100}
"""
    BAD = """
- id: no-bias
  action: zero
  params: "*.bias"

- id: gentle-bias
  action: scale
  params: "fc.bias"
  factor: 0.1
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.compared:
            for other in context.compared:
                if reason := moot(context, rule, other):
                    hint = "remove one of the two, or give them other names or `steps`"
                    yield Finding(rule, ("id",), f"`{rule.id}` {reason}", hint, (other,))
                    break
