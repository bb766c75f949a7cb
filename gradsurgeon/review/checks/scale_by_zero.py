from collections.abc import Iterator

from gradsurgeon.actions.scale import Scale
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class ScaleByZero(Check):
    """A factor of zero does not remove a NaN.

    ## What it finds
    `scale` with `factor: 0`.

    ## Why it matters
    NaN times 0 is NaN, and infinity times 0 is NaN, too: a gradient that was to be removed for its
    bad elements reaches the optimizer all the same.

    ## What to do
    Use `zero`, which writes zeros over whatever is there.
    """

    GOOD = """
- id: no-bias
  action: zero
  params: "*.bias"
"""
    BAD = """
- id: no-bias
  action: scale
  params: "*.bias"
  factor: 0
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            if isinstance(rule, Scale) and rule.factor == 0:
                message = "scaling by 0 leaves NaN: NaN times 0 is NaN"
                yield Finding(rule, ("factor",), message, "use `action: zero`, without `factor`")
