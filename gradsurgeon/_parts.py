"""Gradients in parts, as statistics are taken of them: many in one tensor, or one over many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers


class Segments(NamedTuple):
    """Small gradients that lie one after another in one tensor."""

    flat: Tensor
    lengths: Tensor  # how many elements each of them has, at least 1

    def sum(self, values: Tensor) -> Tensor:
        # A plain sum, one after another, would lose digits in float32.
        return _numbers.by_segments(values.double(), "sum", self.lengths)

    def min(self, values: Tensor) -> Tensor:
        return _numbers.by_segments(values, "min", self.lengths)

    def max(self, values: Tensor) -> Tensor:
        return _numbers.by_segments(values, "max", self.lengths)

    def per_element(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.lengths, output_size=len(self.flat))


class Shards:
    """Sharded gradients, of each of which this rank holds a part, be it empty; `sizes` are whole, in float64.

    Putting numbers together is a collective: all ranks have the same gradients in the same order.
    """

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._grads = [_dist.settled(grad) for grad in grads]
        self.parts = [_dist.local(grad) for grad in self._grads]
        sizes = [grad.numel() for grad in self._grads]
        self.sizes = torch.tensor(sizes, dtype=torch.float64, device=self.parts[0].device)

    def each(self, measure: Callable[..., Tensor], *arguments: Iterable[object]) -> Tensor:
        rows = zip(self.parts, *arguments, strict=True)
        return torch.stack([measure(*row) for row in rows]).double()

    def sum(self, values: Tensor) -> Tensor:
        return _dist.sums(self._grads, values)

    def max(self, values: Tensor) -> Tensor:
        return _dist.maxima(self._grads, values)

    def min(self, values: Tensor) -> Tensor:
        return -self.max(-values)
