"""Statistics of gradients of any layout and dtype, sharded ones included."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers
from gradsurgeon._numbers import Segments, Shards
from gradsurgeon.statistics import STATISTICS

_NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, float32, on their device.

    Of sharded gradients it is that of the whole, which takes a collective: all ranks must come here
    with the same gradients in the same order.
    """
    with torch.no_grad():
        if _dist.any_sharded(grads):
            return _of_shards(stat, Shards(grads)).float()
        if stat == "l2":
            return _numbers.norms(grads)
        # What an empty gradient has is not what a reduction of no elements says.
        segments = STATISTICS[stat].segments
        if segments is not None and all(map(Tensor.numel, grads)):
            small = _numbers.small(grads)
            if small is not None:
                return segments(Segments(*small)).float()
        return torch.stack([statistic(stat, grad) for grad in grads])


def of_small(stats: Sequence[str], tensors: Sequence[Tensor]) -> Tensor:
    """Return statistics of tensors that are small and alike in dtype. Shape ``[len(stats), len(tensors)]``."""
    with torch.no_grad():
        joined = _numbers.small(tensors)
        rows = []
        for stat in stats:
            segments = STATISTICS[stat].segments
            if joined is None or segments is None:
                rows.append(statistics(stat, tensors))
            else:
                rows.append(segments(Segments(*joined)).float())
        return torch.stack(rows)


def statistic(stat: str, grad: Tensor) -> Tensor:
    """Return one statistic of a plain gradient as a 0-dim float32 tensor on its device.

    Mean, extremes and zeros count the elements that a sparse gradient leaves out. An empty gradient
    has norm 0, and NaN for what needs an element.
    """
    if stat == "l2":
        return _numbers.norm(grad)
    how = STATISTICS[stat]
    if grad.numel() == 0:
        return torch.full((), how.empty, device=grad.device)
    elements = _numbers.values(grad)
    if elements.numel() == 0:  # of a sparse gradient in which all are zero
        elements = elements.new_zeros(1)
    elements = _numbers.in_float32(elements)
    return how.measure(elements, grad.numel() - elements.numel()).to(torch.float32)


def _of_shards(stat: str, shards: Shards) -> Tensor:
    how = STATISTICS[stat]
    if not isinstance(how.merge, str):
        return how.merge(shards)
    neutral = _NEUTRAL[how.merge]

    def measured(part: Tensor) -> Tensor:
        if part.numel() == 0:
            return torch.full((), neutral, device=part.device)
        return statistic(stat, part)

    merge = {"sum": shards.sum, "max": shards.max, "min": shards.min}[how.merge]
    return torch.where(shards.sizes == 0, how.empty, merge(shards.each(measured)))
