from collections.abc import Iterator

from gradsurgeon.actions.clamp import Clamp
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class ClampWithoutZero(Check):
    """The bounds of a clamp leave no room for zero.

    ## What it finds
    `clamp` of gradients with a `min` above 0 or a `max` below 0.

    ## Why it matters
    Every element is pushed in one direction at every step, also where the loss does not depend on it,
    and training cannot come to rest. Mostly a minus sign is missing. Sparse gradients are refused when
    the rule is bound, because the result would be dense.

    ## What to do
    Let the bounds enclose 0, such as `min: -0.1` and `max: 0.1`.
    """

    GOOD = """
- id: bounded
  action: clamp
  params: "*.weight"
  at: step
  min: -0.01
  max: 0.1
"""
    BAD = """
- id: bounded
  action: clamp
  params: "*.weight"
  at: step
  min: 0.01
  max: 0.1
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            # Values may well have to be positive; gradients may not.
            if not isinstance(rule, Clamp) or rule.keeps_zero or not rule.ref.grad:
                continue
            key = "min" if rule.min is not None and rule.min > 0 else "max"
            bound = getattr(rule, key)
            what = "below" if key == "min" else "above"
            message = (
                f"no element may be {what} {bound:g}, so that a gradient of 0 becomes {bound:g}"
            )
            yield Finding(
                rule, (key,), message, "let the bounds enclose 0: is a minus sign missing?"
            )
