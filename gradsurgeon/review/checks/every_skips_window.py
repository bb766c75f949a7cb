from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class EverySkipsWindow(Check):
    """A schedule ends before `every` comes round.

    ## What it finds
    `steps` with an `every` that is as long as the window between `from` and `to`, or longer.

    ## Why it matters
    `every` counts from `from`: the rule acts in that one step and never again. A window that holds no
    step at all is refused as an error, `bad-value`.

    ## What to do
    Make `every` smaller or `to` larger. For a single step write `steps: {from: 100, to: 101}`.
    """

    GOOD = """
- id: norms
  action: norm-log
  params: "*"
  steps: {from: 100, to: 200, every: 50}
"""
    BAD = """
- id: norms
  action: norm-log
  params: "*"
  steps: {from: 100, to: 200, every: 500}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            start, stop, every = rule.steps.from_, rule.steps.to, rule.steps.every
            if stop is not None and every > 1 and start + every >= stop:
                message = (
                    f"the rule acts in step {start} only: the next one, {start + every}, is not "
                    f"before `to` ({stop})"
                )
                yield Finding(
                    rule, ("steps", "every"), message, "make `every` smaller or `to` larger"
                )
