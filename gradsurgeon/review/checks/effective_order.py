from collections.abc import Iterator

from gradsurgeon.actions import EditRule, Rule
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.checks._shared import one_is_moot, out_of_order, where_it_acts
from gradsurgeon.review.lint_context import LintContext


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
        def both_edit(rule: Rule, other: Rule) -> bool:
            edits = isinstance(rule, EditRule) and isinstance(other, EditRule)
            return edits and not one_is_moot(context, rule, other)

        for rule, later in out_of_order(context, both_edit):
            hint = "put them in the order in which they act, or choose another `at`"
            key = context.given_key(rule, "at", "action")
            yield Finding(rule, (key,), where_it_acts(rule, "acts", later), hint, later)
