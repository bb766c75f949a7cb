from collections.abc import Iterator

from gradsurgeon.actions import Rule
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.checks._shared import moot
from gradsurgeon.review.lint_context import LintContext, listed


class EffectiveOrder(Check):
    """Two edits take effect in another order than they stand in the file.

    ## What it finds
    A rule that changes gradients which a rule above it changes as well, at an earlier point.

    ## Why it matters
    What acts at `backward` comes before what acts at `step`, wherever it stands: the rule above does
    not get its gradient before this one, but after it. A clip above a scale is a clip of what has been
    scaled.

    ## What to do
    Put the rules in the order in which they take effect, or give this one the point of the other by
    `at`. The plan shows the effective order for each tensor.
    """

    GOOD = """
- id: gentle-head
  action: scale
  params: "head.*"
  factor: 0.5

- id: clipped
  action: clip-norm
  params: "*"
  max_norm: 1.0
"""
    BAD = """
- id: clipped
  action: clip-norm
  params: "*"
  max_norm: 1.0

- id: gentle-head
  action: scale
  params: "head.*"
  factor: 0.5
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, before in context.pairs():
            if rule.role != "edit":
                continue
            met = tuple(
                one for one in before if one.role == "edit" and _swapped(context, one, rule)
            )
            if met:
                ids = listed([one.id for one in met])
                stand = f"which stand{'s' * (len(met) == 1)} above it"
                message = f"it acts at `{rule.point}`, before {ids}, {stand}"
                hint = "put them in the order in which they act, or choose another `at`"
                yield Finding(rule, (context.given_key(rule, "at", "action"),), message, hint, met)


def _swapped(context: LintContext, one: Rule, rule: Rule) -> bool:
    if not context.acts_before(rule, one) or not context.overlap(one, rule):
        return False
    return not moot(context, rule, one) and not moot(context, one, rule)
