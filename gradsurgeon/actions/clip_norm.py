"""The action `clip-norm`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import ByNorm
from gradsurgeon.actions._fields import Flaw
from gradsurgeon.actions._kinds import EditRule
from gradsurgeon.actions._ramps import NumberFrom0, fixed

if TYPE_CHECKING:
    from torch import Tensor


class ClipNorm(EditRule):
    """Shorten a gradient that is longer than a bound, keeping its direction.

    ## What it does
    Multiplies by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does. With
    `per: parameter` each gradient has its own norm. With `per: rule` one norm covers all gradients that
    the rule matches, per owning optimizer, as far as this update uses them: gradients that a `freeze`
    hides in this step do not count. If the norm is non-finite, the gradients stay as they are and an event
    reports it, because scaling would spread a NaN over all of them. Half-precision gradients are measured in
    float32. On a CPU the norm of a finite gradient is finite up to 3.4e38, the largest float32; an accelerator
    sums squares in float32, so there the limit is 1.8e19.

    ## Why use it
    One bad batch must not ruin the weights. To bound single elements use `clamp`.

    ## Points
    `step` (default) bounds the final gradient. `backward` bounds the contribution of each pass, with
    `per: parameter` only, because the other gradients do not exist yet. On module tensors and tags each
    tensor is bounded by itself.

    ## Cost
    One reduction and one multiplication per tensor; never waits for the device. For sharded gradients the
    norm covers the whole gradient, which needs one small collective per rule and step.
    """

    points: ClassVar = ("step", "backward")
    measures: ClassVar[bool] = True
    EXAMPLES: ClassVar = (
        Example({"max_norm": 1.0}, [3.0, 4.0], expect=[0.6, 0.8]),
        Example({"max_norm": 9.0, "per": "rule", "at": "step"}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example({"max_norm": 2.0, "norm_type": "inf"}, [3.0, -4.0], expect=[1.5, -2.0]),
        Example(
            {"max_norm": 1.0},
            [float("nan"), 4.0, float("inf")],
            expect=[float("nan"), 4.0, float("inf")],
        ),
    )

    action: Literal["clip-norm"] = "clip-norm"
    max_norm: Annotated[
        NumberFrom0, Field(description="The largest norm that stays as it is, or a ramp.")
    ]
    norm_type: Annotated[
        Literal[2, "inf"],
        Field(description='Order of the norm: 2, or "inf" for the largest element.'),
    ] = 2
    per: Annotated[
        Literal["parameter", "rule"],
        Field(description="Each gradient by itself, or one norm over all matches of the rule."),
    ] = "parameter"

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        if self.per == "rule" and (self.params is None or self.at == "backward"):
            message = "gradients exist one at a time here: there is no norm over the rule"
            hint = "use `per: parameter`, or `params` and `at: step`"
            yield Flaw("per", message, hint)

    @property
    def may_overflow(self) -> bool:
        return False

    def compile(self) -> ByNorm:
        max_norm = fixed(self.max_norm)

        def factor(norm: Tensor) -> Tensor:
            # Multiplying by 1 costs less than asking the device whether to multiply.
            clipped = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            # A comparison is one launch on a device, `isfinite` is four.
            return clipped.masked_fill_((norm < math.inf).logical_not_(), 1.0)

        return ByNorm(float(self.norm_type), self.per == "rule", factor)
