"""Actions of each kind and statistics, as a user defines them: everything they need stands here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon import (
    CaptureRule,
    Decision,
    Edit,
    EditRule,
    Example,
    FreezeRule,
    ObserverRule,
    Statistic,
    TrapRule,
    add_statistic,
)

if TYPE_CHECKING:
    from torch import Tensor


def _square_mean_of_parts(parts: Tensor) -> Tensor:
    squares, counts = parts.sum(0).unbind(-1)
    return squares / counts


add_statistic("large", Statistic(lambda grad, _: (grad.abs() > 0.01).sum(), merge="sum", empty=0))
add_statistic("top", Statistic(lambda grad, _: grad.amax(), merge="max"))
add_statistic(
    "power",
    Statistic(
        lambda grad, missing: grad.square().sum() / (grad.numel() + missing),
        merge=_square_mean_of_parts,
        part=lambda elements: (elements.double().square().sum(), elements.numel()),
    ),
)


class Flip(EditRule):
    """Turn a gradient around.

    ## What it does
    Multiplies by minus `strength`.
    """

    EXAMPLES: ClassVar = (Example({"strength": 2.0}, [1.0, -3.0], expect=[-2.0, 6.0]),)

    action: Literal["flip"] = "flip"
    strength: Annotated[float, Field(ge=0, description="How much longer it becomes.")] = 1.0

    def compile(self) -> Edit:
        """Return the multiplication."""

        def apply_(grads: Sequence[Tensor]) -> None:
            for grad in grads:
                grad.mul_(-self.strength)

        return Edit(lambda grad: grad * -self.strength, apply_)


class SizeLog(ObserverRule):
    """Record how many elements are large."""

    stats: ClassVar = ("large", "top", "power")

    action: Literal["size-log"] = "size-log"


class Keep(CaptureRule):
    """Keep gradients."""

    action: Literal["keep"] = "keep"


class Hold(FreezeRule):
    """Hold a parameter still."""

    action: Literal["hold"] = "hold"


class SizeTrap(TrapRule):
    """Stop gradients with too large an element."""

    action: Literal["size-trap"] = "size-trap"
    limit: Annotated[float, Field(ge=0, description="The largest that is let through.")]

    def compile(self) -> Decision:
        """Return the question whether the largest element is beyond the limit."""
        return Decision("linf", lambda sizes: sizes > self.limit, self.then, self.give_up_after)
