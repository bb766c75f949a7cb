from collections.abc import Iterator

from gradsurgeon.planning import examples
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class BrokenExpect(Check):
    """A rule matches another number of parameters than its `expect` says.

    ## What it finds
    A rule with `expect` that selects more or fewer parameters of the model whose names lint is given with
    `--params`. Without names it finds nothing.

    ## Why it matters
    Training with such a rule ends with an error before its first step. The number was written down so that
    a pattern cannot come to mean something else unnoticed, and now it does.

    ## What to do
    Look at what the rule matches with `gradsurgeon plan`. Correct the pattern if that is wrong, the number
    if it is right.
    """

    severity = "error"
    NAMES = ("fc1.weight", "fc1.bias", "fc2.weight")
    GOOD = """
- id: norms
  action: norm-log
  params: "fc*.weight"
  expect: {params: 2}
"""
    BAD = """
- id: norms
  action: norm-log
  params: "fc*"
  expect: {params: 2}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        if context.matched is None:
            return
        for rule in context.rules:
            if rule.expect is not None and context.matched.breaks_expect(rule.id):
                things = context.matched.matches[rule.id].things
                matched = f"matched {len(things)}{examples(things)}"
                message = f"expected {rule.expect.params} parameters, {matched}"
                hint = "correct the pattern or the `expect`"
                yield Finding(rule, ("expect", "params"), message, hint)
