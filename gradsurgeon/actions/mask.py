"""The action `mask`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import At, Edit, MaskedUpdate
from gradsurgeon.actions._fields import Flaw
from gradsurgeon.actions._kinds import EditRule

if TYPE_CHECKING:
    from torch import Tensor

_SLICE = re.compile(r"(-?\d{1,12})?:(-?\d{1,12})?")


class Mask(EditRule):
    """Train some rows of a parameter, and keep the others out.

    ## What it does
    `rows` are the rows of dimension 0 that train, as a slice of Python: `"32000:"`, `"-16:"`, `":100"`. The gradient of the
    others becomes 0, also if it is NaN. Weight decay, and momentum of earlier steps, still move them; with `then: freeze`
    their weights and the state of the optimizer for them stay as they are, bit for bit.

    ## Why use it
    New tokens shall learn in a table of embeddings, and the old ones shall stay. To freeze whole tensors use `freeze`.

    ## Points
    Linear, so `backward` and `step` (default) differ only in rounding, and in the input of later rules. `then: freeze` acts at
    `step` only, and not with LBFGS. A shard counts by the rows of the whole parameter.

    ## Cost
    One write per tensor; never waits for the device. `then: freeze` keeps a copy of weight and state during the update.
    """

    points: ClassVar = ("step", "backward")
    targets: ClassVar = ("params",)
    linear: ClassVar[bool] = True
    EXAMPLES: ClassVar = (
        Example({"rows": "1:"}, [-3.0, 0.5, 2.0], expect=[0.0, 0.5, 2.0]),
        Example({"rows": ":-1"}, [-3.0, 0.5, float("nan")], expect=[-3.0, 0.5, 0.0]),
        Example(
            {"rows": "-2:2", "then": "freeze", "at": "step"},
            [1.0, 2.0, 4.0],
            expect=[0.0, 2.0, 0.0],
        ),
    )

    action: Literal["mask"] = "mask"
    rows: Annotated[
        str,
        Field(description='The rows of dimension 0 that train, as a slice: "32000:".'),
    ]
    then: Annotated[
        Literal["zero", "freeze"],
        Field(description="Whether the other rows only get no gradient, or stay bit for bit."),
    ] = "zero"

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        if _SLICE.fullmatch(self.rows) is None:
            message = f'`rows` must be a slice of Python without a step, found "{self.rows[:60]}"'
            yield Flaw("rows", message, 'write "32000:", "-16:" or "10:20"')
        if self.then == "freeze" and self.at == "backward":
            message = "`then: freeze` holds weights during an update, and `backward` is before it"
            yield Flaw("at", message, "remove it, or use `at: step`")

    @property
    def may_overflow(self) -> bool:
        return False

    def param_problem(self, name: str, shape: tuple[int, ...]) -> str:  # noqa: ARG002 # of any name
        if not shape:
            return "is a single number, which has no rows"
        if not self._trains(shape[0]):
            return f'has {shape[0]:,} rows, and `rows: "{self.rows}"` are none of them'
        return ""

    def _trains(self, size: int) -> range:
        first, last = self.rows.split(":")
        bounds = [int(bound) if bound else None for bound in (first, last)]
        return range(size)[slice(*bounds)]

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        def trains(grad: Tensor, at: At) -> Tensor:
            if at.shard is None:
                places = torch.arange(grad.shape[0], device=grad.device)
                size = grad.shape[0]
            else:
                places = at.shard.places[0].to(grad.device)
                size = at.shard.shape[0]
            rows = self._trains(size)
            kept = (places >= rows.start) & (places < rows.stop)
            return kept.view(-1, *[1] * (grad.dim() - 1))

        def apply(grad: Tensor, at: At) -> Tensor:
            return torch.where(trains(grad, at), grad, grad.new_zeros(()))

        if self.then == "freeze":
            return MaskedUpdate(apply, trains=trains)
        return Edit(apply)
