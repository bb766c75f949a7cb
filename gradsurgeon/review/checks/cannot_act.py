from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class CannotAct(Check):
    """A rule cannot act on what it matches, or nobody can tell what it matches.

    ## What it finds
    With the names of a model, which lint is given with `--params`: rules on parameters that have no shape
    yet, that are complex or sparse and do not bear the action, or that several ranks divide so that the
    rule cannot get at them; and conditions that the file of names does not decide, such as
    `where: {module_type: ...}` on a file of weights. Without names it finds nothing.

    ## Why it matters
    Training with such a rule ends with an error before its first step. As long as a condition
    cannot be decided, nobody can see what the rule acts on.

    ## What to do
    The message says what the rule can do instead. For conditions that cannot be decided, give lint the
    names as `gradsurgeon params` writes them.
    """

    severity = "error"
    NAMES = ("fc.weight", "fc.bias")
    WEIGHTS = True
    GOOD = """
- id: norms
  action: norm-log
  params: "fc.*"
"""
    BAD = """
- id: norms
  action: norm-log
  params: "fc.*"
  where: {module_type: "Linear"}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        if context.matched is None:
            return
        for rule in context.rules:
            for text in context.matched.obstacles(rule.id):
                yield Finding(rule, ("id",), text, "")
