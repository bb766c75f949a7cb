"""The action `clamp`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Edit
from gradsurgeon.actions._fields import Flaw, is_number
from gradsurgeon.actions._kinds import EditRule

if TYPE_CHECKING:
    from torch import Tensor, dtype


# On a CPU, above this many elements two passes cost more than a torch call for each tensor.
_MANY = 4096


class Clamp(EditRule):
    """Bound every element of a gradient.

    ## What it does
    Elements below `min` become `min`, elements above `max` become `max`, as with `torch.clamp`: NaN stays
    NaN, an infinite element becomes the bound. A bound that is too large for the dtype of the gradient
    counts as the largest number of that dtype.

    ## Why use it
    A few outliers dominate an update. To bound the length of a gradient and keep its direction, use
    `clip-norm`.

    ## Points
    `at` must be given. At `step` it bounds the final gradient, whatever the set-up. At `backward` it
    bounds the contribution of each backward pass, so the sum over micro-batches or ranks can
    exceed the bound.

    ## Cost
    One reduction and one write per tensor; never waits for the device.
    """

    needs_at: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    either: ClassVar = ("min", "max")
    EXAMPLES: ClassVar = (
        Example({"at": "step", "min": -1.0, "max": 1.0}, [-3.0, 0.5, 2.0], expect=[-1.0, 0.5, 1.0]),
        Example({"at": "step", "min": 0.0}, [-3.0, 0.5, math.inf], expect=[0.0, 0.5, math.inf]),
        Example(
            {"at": "backward", "max": 1.0},
            [math.nan, -math.inf, math.inf],
            expect=[math.nan, -math.inf, 1.0],
        ),
    )

    action: Literal["clamp"] = "clamp"
    min: Annotated[float | None, Field(description="Lower bound of every element.")] = None
    max: Annotated[float | None, Field(description="Upper bound of every element.")] = None

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        yield from super().flaws(given)
        low, high = given.get("min"), given.get("max")
        if low is None and high is None:
            message = "clamp needs a bound: neither `min` nor `max` is given"
            hint = "add `min`, `max` or both"
            yield Flaw("min", message, hint, missing=True, check="missing-key")
        elif is_number(low) and is_number(high) and low > high:
            message = f"min ({low:g}) is greater than max ({high:g})"
            yield Flaw("min", message, "exchange them, or leave one out")

    @property
    def keeps_zero(self) -> bool:
        return (self.min is None or self.min <= 0) and (self.max is None or self.max >= 0)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.at == "step":
            return ()
        text = "bounds the unscaled contribution of each backward pass; their sum can exceed it"
        return (text,)

    def complex_problem(self) -> str:
        return "complex numbers have no order, so `clamp` cannot bound them"

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        low, high = self.min, self.max

        @cache
        def bounds(kind: dtype) -> tuple[float | None, float | None]:
            # torch refuses a bound beyond float16; the largest finite number has the same effect.
            limit = torch.finfo(kind).max
            return (
                None if low is None else max(-limit, min(limit, low)),
                None if high is None else max(-limit, min(limit, high)),
            )

        @cache
        def rounded(kind: dtype) -> tuple[float, float]:
            # The bounds in the dtype of the elements, with which torch compares them.
            below, above = bounds(kind)
            return (
                -math.inf if below is None else torch.tensor(below, dtype=kind).item(),
                math.inf if above is None else torch.tensor(above, dtype=kind).item(),
            )

        def apply(grad: Tensor) -> Tensor:
            return grad.clamp(*bounds(grad.dtype))

        def apply_(grads: Sequence[Tensor]) -> None:
            kinds = {grad.dtype for grad in grads}
            for kind in kinds:
                alike = [g for g in grads if g.dtype == kind] if len(kinds) > 1 else grads
                _clamp_(alike, *bounds(kind))

        def alters(grad: Tensor) -> Tensor:
            below, above = bounds(grad.dtype)
            low_ones = torch.zeros_like(grad, dtype=torch.bool) if below is None else grad < below
            return (low_ones if above is None else low_ones.logical_or_(grad > above)).any()

        def decided(smallest: float, largest: float, kind: dtype) -> bool | None:
            if math.isnan(smallest):
                return None
            below, above = rounded(kind)
            return smallest < below or largest > above

        return Edit(apply, apply_, alters, decided=decided)


def _clamp_(grads: Sequence[Tensor], below: float | None, above: float | None) -> None:
    import torch  # noqa: PLC0415 # as above

    together = list(grads)
    if max(map(torch.Tensor.numel, grads)) > _MANY:
        large = [grad for grad in grads if grad.is_cpu and grad.numel() > _MANY]
        together = [grad for grad in grads if not (grad.is_cpu and grad.numel() > _MANY)]
        for grad in large:
            grad.clamp_(below, above)
    if together and below is not None:
        torch._foreach_clamp_min_(together, below)  # torch has no public function
    if together and above is not None:
        torch._foreach_clamp_max_(together, above)  # as above
