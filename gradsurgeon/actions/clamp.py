"""The action `clamp`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Edit
from gradsurgeon.actions._fields import Flaw
from gradsurgeon.actions._kinds import EditRule
from gradsurgeon.actions._ramps import Number, ends, fixed

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

    ## Weights
    `tensor: value`, without `at`, bounds the weight after each update that took place, as Wasserstein GANs do
    (Arjovsky et al. 2017). Parameters that a `freeze` holds stay as they are.

    ## Cost
    One write per tensor; never waits for the device.
    """

    needs_at: ClassVar[bool] = True
    of_weights: ClassVar = ("value",)
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
    min: Annotated[Number | None, Field(description="Lower bound of every element, or a ramp.")] = (
        None
    )
    max: Annotated[Number | None, Field(description="Upper bound of every element, or a ramp.")] = (
        None
    )

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        low = self.min
        high = self.max
        if low is None and high is None:
            message = "clamp needs a bound: neither `min` nor `max` is given"
            hint = "add `min`, `max` or both"
            yield Flaw("min", message, hint, "missing-key")
        elif low is not None and high is not None:
            for below, above in zip(ends(low), ends(high), strict=True):
                if below > above:
                    message = f"min ({below:g}) is greater than max ({above:g})"
                    yield Flaw("min", message, "exchange them, or leave one out")
                    break

    @property
    def may_overflow(self) -> bool:
        return False

    @property
    def keeps_zero(self) -> bool:
        if self.min is not None and max(ends(self.min)) > 0:
            return False
        return self.max is None or min(ends(self.max)) >= 0

    @property
    def notes(self) -> tuple[str, ...]:
        if self.at == "step" or self.point == "updated":
            return super().notes
        text = "bounds the unscaled contribution of each backward pass; their sum can exceed it"
        return (*super().notes, text)

    def complex_problem(self) -> str:
        return "complex numbers have no order, so `clamp` cannot bound them"

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        def rounded(number: Number | None, kind: dtype, absent: float) -> float:
            if number is None:
                return absent
            bound = fixed(number)
            # torch refuses a bound beyond float16; the largest finite number has the same effect.
            limit = torch.finfo(kind).max
            return torch.tensor(max(-limit, min(limit, bound)), dtype=kind).item()

        @cache
        def bounds(kind: dtype) -> tuple[float, float]:
            """Return the bounds as torch compares them with elements of a dtype."""
            return rounded(self.min, kind, -math.inf), rounded(self.max, kind, math.inf)

        bounds(torch.float32)  # asks torch for a number, which no step shall wait for

        def apply(grad: Tensor) -> Tensor:
            return grad.clamp(*bounds(grad.dtype))

        def apply_(grads: Sequence[Tensor]) -> None:
            kinds = {grad.dtype for grad in grads}
            for kind in kinds:
                alike = grads
                if len(kinds) > 1:
                    alike = [grad for grad in grads if grad.dtype == kind]
                _clamp_(alike, *bounds(kind))

        return Edit(apply, apply_)


def _clamp_(grads: Sequence[Tensor], below: float, above: float) -> None:
    import torch  # noqa: PLC0415 # as above

    together = []
    for grad in grads:
        if grad.is_cpu and grad.numel() > _MANY:
            grad.clamp_(below, above)
        else:
            together.append(grad)
    if together and below > -math.inf:
        torch._foreach_clamp_min_(together, below)  # torch has no public function
    if together and above < math.inf:
        torch._foreach_clamp_max_(together, above)  # as above
