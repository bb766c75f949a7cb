"""The action `sanitize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Edit
from gradsurgeon.actions._kinds import EditRule

if TYPE_CHECKING:
    from torch import Tensor


class Sanitize(EditRule):
    """Replace non-finite elements by zero.

    ## What it does
    NaN and infinite elements become 0; all others are unchanged.

    ## Why use it
    A known source of single bad elements, such as a mask that divides by zero, must not end the run.
    It hides the cause: put a `norm-log` of `nonfinite` before it, and fix the model. A `nan-trap`
    looks later and sees no non-finite element.

    ## Points
    `backward` only: once gradients accumulate, a NaN has replaced the contributions of the other passes.

    ## Cost
    One pass over the tensor; never waits for the device.
    """

    points: ClassVar = ("backward",)
    linear: ClassVar[bool] = True
    EXAMPLES: ClassVar = (
        Example({}, [1.0, float("nan"), float("-inf")], expect=[1.0, 0.0, 0.0]),
        Example({}, [1.0, -2.0], expect=[1.0, -2.0]),
    )

    action: Literal["sanitize"] = "sanitize"

    @property
    def hides_overflow(self) -> bool:
        return self.target == "params" or self.ref.grad

    @property
    def may_overflow(self) -> bool:
        return False

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        def apply(grad: Tensor) -> Tensor:
            # Not `nan_to_num`, which keeps the finite part of a complex number.
            return torch.where(grad.isfinite(), grad, torch.zeros_like(grad))

        def apply_(grads: Sequence[Tensor]) -> None:
            for grad in grads:
                grad.masked_fill_(grad.isfinite().logical_not_(), 0.0)

        return Edit(apply, apply_)
