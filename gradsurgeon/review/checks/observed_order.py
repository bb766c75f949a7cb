from collections.abc import Iterator

from gradsurgeon.actions import CaptureRule, EditRule, ObserverRule, Rule
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.checks._shared import out_of_order, where_it_acts
from gradsurgeon.review.lint_context import LintContext

_OBSERVING = ObserverRule | CaptureRule


class ObservedOrder(Check):
    """A record is taken before an edit that stands above it, or after one that stands below.

    ## What it finds
    `norm-log` and `capture` beside an edit of the same gradients, where the point of the lower rule
    comes before that of the upper one.

    ## Why it matters
    One expects a record below an edit to show what the edit has left. By default records are taken at
    `accumulated`, which is before everything at `step` and after everything at `backward`.

    ## What to do
    If you want what the optimizer gets, write `at: step` below the edits. Otherwise nothing: the record
    is right, and the order in the file does not matter.
    """

    severity = "note"
    GOOD = """
- id: clipped
  action: clip-norm
  params: "*"
  max_norm: 1.0

- id: what-is-left
  action: norm-log
  params: "*"
  at: step
"""
    BAD = """
- id: clipped
  action: clip-norm
  params: "*"
  max_norm: 1.0

- id: what-is-left
  action: norm-log
  params: "*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, later in out_of_order(context, _edit_and_observation):
            does = "changes gradients" if isinstance(rule, EditRule) else "sees gradients"
            hint = "put it above, or choose another `at`"
            key = context.given_key(rule, "at", "action")
            yield Finding(rule, (key,), where_it_acts(rule, does, later), hint, later)


def _edit_and_observation(first: Rule, second: Rule) -> bool:
    edits = [isinstance(rule, EditRule) for rule in (first, second)]
    return edits.count(True) == 1 and any(isinstance(rule, _OBSERVING) for rule in (first, second))
