"""The action `scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Edit
from gradsurgeon.actions._kinds import EditRule
from gradsurgeon.actions._ramps import Number, ends, fixed

if TYPE_CHECKING:
    from torch import Tensor


CANCELLED = (
    "under Adam and optimizers like it (AdamW, RMSprop, Adagrad) a constant factor changes next to nothing: they divide each "
    "gradient by its running size"
)
IN_ITS_PLACE = (
    "write `tensor: update` without `at`, or give these parameters a group with a learning rate of "
    "their own"
)


class Scale(EditRule):
    """Multiply a gradient by a constant.

    ## What it does
    Multiplies every element by `factor`. NaN times 0 is NaN: to remove a gradient use `zero`.

    ## Why use it
    One part of the model should learn slower or faster than its optimizer group, or with the sign
    reversed, as in domain-adversarial training. Mind that Adam divides by the running size of the
    gradient, so a constant factor hardly changes its updates: `lint` and `plan` say so, and a notice where the
    optimizer is one of these, under `gradsurgeon run` a line.

    ## Points
    Linear, so `backward` (default) and `step` differ only in rounding, and in the input of later rules.

    ## Weights and updates
    `tensor: update`, without `at`, multiplies what an update has changed: a learning rate per layer, also under Adam.
    Weight decay of the optimizer is part of the update. `tensor: value` multiplies the weight after the update.
    Only updates that took place count, and parameters that a `freeze` holds stay as they are.

    ## Cost
    One pass over the tensor; never waits for the device. With `tensor: update` the matched weights are copied
    before each update, and the copy lives until the update is over.
    """

    linear: ClassVar[bool] = True
    of_weights: ClassVar = ("value", "update")
    EXAMPLES: ClassVar = (
        Example({"factor": 2.0}, [-3.0, 0.5], expect=[-6.0, 1.0]),
        Example({"factor": -0.5, "at": "step"}, [2.0, 0.0], expect=[-1.0, 0.0]),
        Example({"factor": 1.0}, [2.0, 4.0], expect=[2.0, 4.0]),
    )

    action: Literal["scale"] = "scale"
    factor: Annotated[
        Number, Field(description="The number that multiplies every element, or a ramp.")
    ]

    @property
    def may_be_cancelled(self) -> bool:
        """Whether an optimizer that divides each gradient by its running size undoes this rule."""
        if self.target != "params" or self.tensor in self.of_weights:
            return False
        # A negative factor turns the update round, and a factor of 0 stops it.
        # A ramp changes the updates while it lasts.
        return self.steps.always and not self.ramps and min(ends(self.factor)) > 0

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.may_be_cancelled:
            return super().notes
        return (*super().notes, CANCELLED)

    @property
    def may_overflow(self) -> bool:
        return max(map(abs, ends(self.factor))) > 1.0

    def compile(self) -> Edit:

        from gradsurgeon.tensors import _numbers  # noqa: PLC0415 # the same

        factor = fixed(self.factor)

        def apply(grad: Tensor) -> Tensor:
            return grad * factor

        def apply_(grads: Sequence[Tensor]) -> None:
            _numbers.scale_(grads, [factor] * len(grads))

        return Edit(apply, apply_)
