"""The action `zero`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Edit
from gradsurgeon.actions._kinds import EditRule

if TYPE_CHECKING:
    from torch import Tensor


class Zero(EditRule):
    """Set a gradient to zero.

    ## What it does
    Every element becomes 0, also NaN and infinite elements.

    ## Why use it
    To cut a parameter out of one loss, or to see a run without its gradient. It is not
    freezing: weight decay and the momentum of earlier steps still move the weight.

    ## Points
    `backward` (default) drops the contribution of this pass, `step` the whole accumulated gradient.

    ## Cost
    One write per tensor; never waits for the device.
    """

    linear: ClassVar[bool] = True
    EXAMPLES: ClassVar = (
        Example({}, [-3.0, 0.5, float("nan"), float("inf")], expect=[0.0, 0.0, 0.0, 0.0]),
        Example({"at": "step"}, [0.0, 0.0], expect=[0.0, 0.0]),
    )

    action: Literal["zero"] = "zero"

    @property
    def notes(self) -> tuple[str, ...]:
        return ("zero is not freeze: weight decay and momentum still move the weight",)

    @property
    def may_overflow(self) -> bool:
        return False

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        def apply_(grads: Sequence[Tensor]) -> None:
            torch._foreach_zero_(list(grads))  # torch has no public function

        # A multiplication by zero would keep NaN and turn an infinity into NaN.
        return Edit(torch.zeros_like, apply_)
