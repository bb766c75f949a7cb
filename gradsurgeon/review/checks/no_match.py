from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class NoMatch(Check):
    """A rule matches nothing in the model.

    ## What it finds
    A rule that selects no parameter, or no module, of the model whose names lint is given with
    `--params`. Without names it finds nothing.

    ## Why it matters
    Training with such a rule ends with an error before its first step. Most often a name is misspelt, or
    the model has changed and the rule has not.

    ## What to do
    Correct the pattern: the nearest names are given. Where a rule is meant for some models only, write
    `optional: true`, or `model:` with the class that it is for.
    """

    severity = "error"
    NAMES = ("encoder.fc.weight", "encoder.fc.bias")
    GOOD = """
- id: norms
  action: norm-log
  params: "encoder.*"
"""
    BAD = """
- id: norms
  action: norm-log
  params: "encodr.*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        if context.matched is None:
            return
        for rule in context.rules:
            if context.matched.has_no_match(rule.id):
                hint = "correct the pattern, or write `optional: true` if it may match nothing"
                yield Finding(rule, (rule.target,), context.matched.no_match(rule.id), hint)
