from collections.abc import Iterator

from gradsurgeon.actions.scale import Scale
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class ScaleByOne(Check):
    """A factor of one does nothing.

    ## What it finds
    `scale` with `factor: 1`.

    ## Why it matters
    The rule costs a pass over every tensor that it matches and changes none of them.

    ## What to do
    Remove the rule. A `norm-log` does not need it to see a gradient.
    """

    GOOD = """
- id: gentle-head
  action: scale
  params: "head.*"
  factor: 0.5
"""
    BAD = """
- id: gentle-head
  action: scale
  params: "head.*"
  factor: 1.0
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            if isinstance(rule, Scale) and rule.factor == 1:
                message = "scaling by 1 changes nothing"
                yield Finding(rule, ("factor",), message, "remove the rule, or correct the factor")
