"""Checks on the value of one option."""

from collections.abc import Iterator

from gradsurgeon.actions.clamp import Clamp
from gradsurgeon.actions.scale import Scale
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class BoundOnContributions(Check):
    """A bound at `backward` does not bound the gradient.

    At `backward` a `clamp` or `clip-norm` sees what one backward pass contributes. Under gradient
    accumulation the sum can exceed the bound; under DDP each rank bounds its own share before the
    average. So a change of the number of micro-batches, or of ranks, changes what the rule does.

    Write `at: step`, where the bound holds for the gradient that the optimizer gets. If each
    contribution is what you mean to bound, suppress the warning.
    """

    BAD = """
- id: bounded
  action: clamp
  params: "*.weight"
  at: backward
  min: -0.1
  max: 0.1
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            contribution = rule.target == "params" and rule.point == "backward"
            if contribution and rule.takes_at and not rule.linear:
                message = (
                    f"{rule.action} at `backward` bounds what each backward pass contributes: under "
                    "accumulation the sum can exceed the bound, and under DDP each rank bounds its own share"
                )
                yield Finding(rule, ("at",), message, "`at: step` bounds the final gradient")


class ClampWithoutZero(Check):
    """The bounds of a clamp of gradients leave no room for zero.

    With a `min` above 0 or a `max` below 0 every element is pushed in one direction at every step, also
    where the loss does not depend on it, and training cannot come to rest. Sparse gradients are refused
    when the rule is bound, because the result would be dense.

    Let the bounds enclose 0, such as `min: -0.1` and `max: 0.1`. Mostly a minus sign is missing.
    """

    BAD = """
- id: bounded
  action: clamp
  params: "*.weight"
  at: step
  min: 0.01
  max: 0.1
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            # Values may well have to be positive; gradients may not.
            if not isinstance(rule, Clamp) or rule.keeps_zero or not rule.ref.grad:
                continue
            key = "min" if rule.min is not None and rule.min > 0 else "max"
            bound = getattr(rule, key)
            what = "below" if key == "min" else "above"
            message = (
                f"no element may be {what} {bound:g}, so that a gradient of 0 becomes {bound:g}"
            )
            hint = "let the bounds enclose 0: is a minus sign missing?"
            yield Finding(rule, (key,), message, hint)


class ScaleByZero(Check):
    """A factor of zero does not remove a NaN.

    NaN times 0 is NaN, and infinity times 0 is NaN, too: a gradient that was to be removed for its bad
    elements reaches the optimizer all the same.

    Use `zero`, which writes zeros over whatever is there.
    """

    BAD = """
- id: no-bias
  action: scale
  params: "*.bias"
  factor: 0
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            if isinstance(rule, Scale) and rule.factor == 0:
                message = "scaling by 0 leaves NaN: NaN times 0 is NaN"
                yield Finding(rule, ("factor",), message, "use `action: zero`, without `factor`")
