"""The action `zero`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Edit
from gradsurgeon.actions._kinds import EditRule

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Zero(EditRule):
    """Set a gradient to zero.

    ## What it does
    Every element becomes 0, NaN and infinities included.

    ## Why use it
    To cut a parameter out of one loss, or to see what a run does without its gradient. It is not
    the same as freezing: weight decay and the momentum of earlier steps still move the weight.

    ## Points
    `backward` (default) drops what this pass contributes, `step` everything that has accumulated.

    ## Cost
    One write per tensor; never waits for the device.
    """

    EXAMPLES: ClassVar = (
        Example({}, [-3.0, 0.5, float("nan"), float("inf")], expect=[0.0, 0.0, 0.0, 0.0]),
        Example({"at": "step"}, [0.0, 0.0], expect=[0.0, 0.0]),
    )

    action: Literal["zero"] = "zero"

    @property
    def notes(self) -> tuple[str, ...]:
        return ("zero is not freeze: weight decay and momentum still move the weight",)

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        def apply_(grads: Sequence[Tensor]) -> None:
            torch._foreach_zero_(list(grads))  # torch has no public one

        def alters(grad: Tensor) -> Tensor:
            return (grad != 0).any()

        def decided(smallest: float, largest: float, _kind: dtype) -> bool:
            return not smallest == largest == 0.0

        # A multiplication by zero would keep NaN and turn an infinity into NaN.
        return Edit(torch.zeros_like, apply_, alters, decided=decided)
