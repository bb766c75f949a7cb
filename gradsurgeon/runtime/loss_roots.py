"""The losses of a backward pass: the values that it begins from, if each is one number that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsurgeon.tensors import _dist, _torch
from gradsurgeon.tensors.readable import readable


@dataclass(slots=True, eq=False)
class LossRoots:
    """The losses of one backward pass, detached.

    Attributes:
        values: one-element tensors, real floating point; scaled where a `GradScaler` has scaled them.
        made: the number of the first of their nodes; torch numbers nodes upwards.
        begun: the number of the next node when the pass began.
    """

    values: Sequence[Tensor]
    made: int
    begun: int

    def take(self) -> Sequence[Tensor]:
        """Return the losses, once: several rules see the end of one pass."""
        values = self.values
        self.values = ()
        return values


def loss_roots(outputs: Sequence[Any]) -> LossRoots:
    """Return the losses among the tensors that a pass begins from."""
    values = []
    made = []
    begun = _torch.next_node_number()
    for output in outputs:
        value = _value_of(output)
        if value is not None:
            values.append(value)
            # A leaf has no node, and may be older than every pass.
            node = output.grad_fn
            made.append(begun if node is None else node._sequence_nr())  # noqa: SLF001 # no public name
    return LossRoots(values, min(made, default=begun), begun)


def _value_of(output: Any) -> Tensor | None:
    if not isinstance(output, Tensor) or output.numel() != 1 or not output.is_floating_point():
        return None
    if type(output) is not Tensor and _dist.is_partial(output):
        return None
    return readable(output)
