"""What several checks ask."""

from __future__ import annotations

from collections.abc import Iterator

from gradsurgeon.actions import EditRule, FreezeRule, Rule
from gradsurgeon.review.lint_context import LintContext


def patterns(rule: Rule) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and the text of every pattern of a rule, those it excludes included."""
    for key in (rule.target, "exclude"):
        for index, text in enumerate(getattr(rule, key)):
            yield (key, index), text


def one_is_moot(context: LintContext, first: Rule, second: Rule) -> bool:
    return bool(moot(context, first, second) or moot(context, second, first))


def moot(context: LintContext, rule: Rule, by: Rule) -> str:
    """Return why a rule has no effect beside another one; empty if it has one, or may have."""
    if rule is by or by.action not in ("zero", "freeze") or not context.covers(by, rule):
        return ""
    first = context.acts_before(by, rule)
    if by.action == "freeze":
        if isinstance(rule, EditRule) or (isinstance(rule, FreezeRule) and first):
            return f"does nothing: `{by.id}` keeps the optimizer off these parameters"
        return ""
    if not isinstance(rule, EditRule):
        return ""
    if first:
        return (
            f"does nothing: `{by.id}` has set all of it to zero before" if rule.keeps_zero else ""
        )
    # Of two that zero the same, the later one is superfluous, as the first branch says.
    return "" if rule.action == "zero" else f"has no effect: `{by.id}` sets all of it to zero later"
