from collections.abc import Iterator

from gradsurgeon.actions import TrapRule
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext, listed


class TrapAfterSanitize(Check):
    """A trap waits for what another rule has removed.

    ## What it finds
    `nan-trap` on tensors that are all under a `sanitize`, or under a `zero`, which acts before.

    ## Why it matters
    The trap looks after each backward pass, when every NaN and every infinity has been replaced: it
    cannot trip, while the file looks as if the run were guarded.

    ## What to do
    Narrow `sanitize` down to the known culprit and let the trap guard the rest. To know how often
    there was something to replace, put a `norm-log` with `stats: [nonfinite]` and `at: backward` above.
    """

    GOOD = """
- id: known-culprit
  action: sanitize
  params: "mask.weight"

- id: guard
  action: nan-trap
  params: "*"
"""
    BAD = """
- id: clean
  action: sanitize
  params: "*"

- id: guard
  action: nan-trap
  params: "*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        cleaners = [rule for rule in context.compared if rule.action in ("sanitize", "zero")]
        for trap in (rule for rule in context.compared if isinstance(rule, TrapRule)):
            before = tuple(
                rule
                for rule in cleaners
                if context.acts_before(rule, trap) and context.covers(rule, trap)
            )
            if before:
                replace = f"replace{'s' * (len(before) == 1)}"
                message = f"the trap never sees a NaN: {listed(before)} {replace} it before"
                hint = "narrow that rule down, or remove the trap"
                yield Finding(trap, ("action",), message, hint, before)
