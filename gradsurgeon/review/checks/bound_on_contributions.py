from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class BoundOnContributions(Check):
    """A bound at `backward` does not bound the gradient.

    ## What it finds
    `clamp` and `clip-norm` on parameters at `backward`.

    ## Why it matters
    At `backward` a rule sees what one backward pass contributes. Under gradient accumulation the sum
    can exceed the bound; under DDP each rank bounds its own share before the average. So a change of
    the number of micro-batches, or of ranks, changes what the rule does.

    ## What to do
    Write `at: step`, where the bound holds for the gradient that the optimizer gets. If each
    contribution is what you mean to bound, suppress the warning.
    """

    GOOD = """
- id: bounded
  action: clamp
  params: "*.weight"
  at: step
  min: -0.1
  max: 0.1
"""
    BAD = """
- id: bounded
  action: clamp
  params: "*.weight"
  at: backward
  min: -0.1
  max: 0.1
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            if rule.target == "params" and rule.point == "backward" and not rule.linear:
                message = (
                    f"{rule.action} at `backward` bounds what each backward pass contributes: under "
                    "accumulation the sum can exceed the bound, and under DDP each rank bounds its own share"
                )
                yield Finding(rule, ("at",), message, "`at: step` bounds the final gradient")
