"""The action `centralize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import At, Edit, refuse_divided
from gradsurgeon.actions._kinds import EditRule

if TYPE_CHECKING:
    from torch import Tensor

_VECTOR = 1


class Centralize(EditRule):
    """Take the mean off the gradient of each output of a layer.

    ## What it does
    Subtracts the mean over all dimensions but the first, as gradient centralization does (Yong et al. 2020,
    arXiv:2004.01461). Vectors and single numbers stay as they are. Half-precision means are taken in float32.

    ## Why use it
    Weights of linear and convolutional layers often train faster, and generalize better, under this constraint.

    ## Points
    Linear, so `backward` and `step` (default) differ only in rounding. A parameter whose rows are divided over ranks,
    as in row-wise tensor parallelism, is refused.

    ## Cost
    One reduction and one subtraction per tensor; never waits for the device.
    """

    points: ClassVar = ("step", "backward")
    linear: ClassVar[bool] = True
    EXAMPLES: ClassVar = (Example({}, [1.0, 3.0], expect=[1.0, 3.0]),)

    action: Literal["centralize"] = "centralize"

    def compile(self) -> Edit:
        from gradsurgeon.tensors import _numbers  # noqa: PLC0415 # reading rules must not need torch

        def apply(grad: Tensor, at: At) -> Tensor:
            if grad.dim() <= _VECTOR:
                return grad.clone()
            _refuse(at)
            return _numbers.in_float32(grad).sub(mean(grad)).to(grad.dtype)

        def apply_(grads: Sequence[Tensor], names: Sequence[str], step: int) -> None:  # noqa: ARG001 # alike for all
            for grad in grads:
                if grad.dim() > _VECTOR:
                    # In the dtype of the mean, then rounded.
                    grad.sub_(mean(grad))

        def mean(grad: Tensor) -> Tensor:
            wide = _numbers.in_float32(grad)
            return wide.mean(tuple(range(1, grad.dim())), keepdim=True)

        return Edit(apply, apply_, _refuse)


def _refuse(at: At) -> None:
    if at.shard is not None and len(at.shard.shape) > _VECTOR:
        refuse_divided(at)
