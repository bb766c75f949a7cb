from collections.abc import Iterator

from gradsurgeon.actions import Rule
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class UselessExclude(Check):
    """An `exclude` takes nothing out.

    ## What it finds
    An exclude that matches no name which the patterns of the rule match. Where the names of a model
    are not known, only one that is certain: the exclude is a name without wildcards, or all patterns are.

    ## Why it matters
    Somebody meant to keep the rule off something, and it acts there: the exclude is misspelt, or lacks
    a star. `exclude: "bias"` is the name `bias`, not all biases.

    ## What to do
    Correct or remove it. Of a tied parameter, excluding any of its names excludes it; where the names
    are not known, lint cannot see that, and the warning is to be suppressed.
    """

    GOOD = """
- id: clipped
  action: clip-norm
  params: "layers.*"
  exclude: "*.bias"
  max_norm: 1.0
"""
    BAD = """
- id: clipped
  action: clip-norm
  params: "layers.*"
  exclude: "bias"
  max_norm: 1.0
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for index, text in enumerate(rule.exclude):
                if why := _nothing(context, rule, text):
                    hint = "correct or remove it"
                    if "*" not in text and not text.startswith("re:") and "re:" not in why:
                        hint = f'did you mean "*{text[:60]}" or "{text[:60]}*"?'
                    yield Finding(rule, ("exclude", index), why, hint)


def _nothing(context: LintContext, rule: Rule, text: str) -> str:
    """Return why an exclude leaves nothing out; empty if it does, or may."""
    hits = context.hits(rule, text)
    if hits is None:
        name = f"`{text[:60]}` matches no name that the patterns of the rule can match"
        return name if context.never_matches(rule, text) else ""
    owners = context.canonical_hits(rule, text)
    wanted = {name for p in rule.patterns for name in context.canonical_hits(rule, p.text)}
    return "" if owners & wanted else f"`{text[:60]}` takes nothing out of the match"
