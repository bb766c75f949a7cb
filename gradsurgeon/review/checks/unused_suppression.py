from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class UnusedSuppression(Check):
    """A comment suppresses nothing.

    ## What it finds
    `# gradsurgeon: ignore[...]` with the name of a check that finds nothing there, that does not exist,
    or that cannot be suppressed: errors cannot.

    ## Why it matters
    It stays behind when its reason is gone, and would hide the next problem of the kind.

    ## What to do
    Remove it, or correct the name. A comment counts for its own line; on a line of its own for the
    line below; behind the `id` of a rule for the whole rule. Several names are separated by commas.
    """

    GOOD = """
- id: no-bias
  action: zero  # gradsurgeon: ignore[zero-is-not-freeze]
  params: "*.bias"
"""
    BAD = """
- id: no-bias
  action: freeze  # gradsurgeon: ignore[zero-is-not-freeze]
  params: "*.bias"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        del context  # it is known once all other checks have found what they find
        return iter(())
