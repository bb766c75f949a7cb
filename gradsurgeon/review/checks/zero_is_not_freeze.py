from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.checks._shared import moot
from gradsurgeon.review.lint_context import LintContext


class ZeroIsNotFreeze(Check):
    """A parameter whose gradient is set to zero still moves.

    ## What it finds
    `zero` on parameters.

    ## Why it matters
    The optimizer goes on with what it has: weight decay shrinks the weight, and the momentum of
    earlier steps carries it on. The gradient counts as one of zeros in the statistics of Adam.

    ## What to do
    To keep a parameter as it is, use `freeze`. To drop what a loss contributes to it, `zero` is right.
    """

    severity = "note"
    GOOD = """
- id: keep-backbone
  action: freeze
  params: "backbone.*"
"""
    BAD = """
- id: keep-backbone
  action: zero
  params: "backbone.*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        message = "zero is not freeze: weight decay and momentum still move the weight"
        for rule in context.rules:
            if rule.action != "zero" or rule.target != "params":
                continue
            if not any(moot(context, rule, by) for by in context.compared):
                yield Finding(
                    rule, ("action",), message, "to keep a parameter as it is use `freeze`"
                )
