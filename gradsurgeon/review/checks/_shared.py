"""What several checks ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gradsurgeon.actions import EditRule, FreezeRule, Rule
from gradsurgeon.review.lint_context import LintContext, listed


def patterns(rule: Rule) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and the text of every pattern of a rule, those it excludes included."""
    for key in (rule.target, "exclude"):
        for index, text in enumerate(getattr(rule, key)):
            yield (key, index), text


def out_of_order(
    context: LintContext, is_pair: Callable[[Rule, Rule], bool]
) -> Iterator[tuple[Rule, tuple[Rule, ...]]]:
    """Yield each rule that acts before rules that stand above it and make a pair with it, with these."""
    for rule, above in context.pairs():
        later = tuple(
            other
            for other in above
            if is_pair(rule, other)
            and context.acts_before(rule, other)
            and context.overlap(other, rule)
        )
        if later:
            yield rule, later


def where_it_acts(rule: Rule, does: str, later: Sequence[Rule]) -> str:
    stand = f"which stand{'s' * (len(later) == 1)} above it"
    return f"it {does} at `{rule.point}`, before {listed(later)}, {stand}"


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
