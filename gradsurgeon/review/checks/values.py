"""Checks on the value of one option."""

from collections.abc import Iterator

from gradsurgeon.actions.clamp import Clamp
from gradsurgeon.actions.scale import Scale
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class BoundOnContributions(Check):
    """A bound at `backward` does not bound the gradient.

    At `backward` a `clamp` or `clip-norm` bounds the contribution of one backward pass. Under gradient
    accumulation the sum can exceed the bound; under DDP each rank bounds its own share before the average.
    So the effect of the rule depends on the number of micro-batches and of ranks.

    Write `at: step` to bound the gradient that the optimizer gets. If you mean to bound each contribution,
    suppress the warning.
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
                    f"{rule.action} at `backward` bounds the contribution of each backward pass: under "
                    "accumulation the sum can exceed the bound, and under DDP each rank bounds its own share"
                )
                yield Finding(rule, ("at",), message, "`at: step` bounds the final gradient")


class ClampWithoutZero(Check):
    """The bounds of a clamp of gradients exclude zero.

    With a `min` above 0 or a `max` below 0, every element moves in one direction at every step, even if the loss
    does not depend on it, and training cannot converge. Binding refuses such a rule on sparse gradients, because
    the result would be dense.

    Include 0 in the bounds, such as `min: -0.1` and `max: 0.1`. Often a minus sign is missing.
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
            # A positive bound makes sense for values, but not for gradients.
            if not isinstance(rule, Clamp) or rule.keeps_zero or not rule.ref.grad:
                continue
            key = "min" if rule.min is not None and rule.min > 0 else "max"
            bound = getattr(rule, key)
            what = "below" if key == "min" else "above"
            message = f"no element may be {what} {bound:g}, so a gradient of 0 becomes {bound:g}"
            hint = "include 0 in the bounds: is a minus sign missing?"
            yield Finding(rule, (key,), message, hint)


class ScaleByZero(Check):
    """A factor of zero does not remove a NaN.

    NaN times 0 is NaN, and so is infinity times 0. A gradient that should be removed because of its non-finite
    elements still reaches the optimizer.

    Use `zero`, which overwrites every element with zero.
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
