"""Statistics of gradients of any layout and dtype, including sharded gradients."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers
from gradsurgeon._numbers import Segments
from gradsurgeon.statistics import STATISTICS

# The number of an empty shard, for a statistic without a `part` function.
_NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}
_MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts[..., 0].sum(0),
    "max": lambda parts: parts[..., 0].amax(0),
    "min": lambda parts: parts[..., 0].amin(0),
}


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, float32, on their device.

    For sharded gradients this is a collective and measures whole gradients: all ranks must call it with the same
    gradients in the same order.
    """
    with torch.no_grad():
        if _dist.any_sharded(grads):
            return _of_shards(stat, grads).float()
        if stat == "l2":
            return _numbers.norms(grads)
        # A reduction of no elements would not give the `empty` number of a statistic.
        segments = STATISTICS[stat].segments
        if segments is not None and all(map(Tensor.numel, grads)):
            small = _numbers.small(grads)
            if small is not None:
                return segments(Segments(*small)).float()
        return torch.stack([statistic(stat, grad) for grad in grads])


def of_small(stats: Sequence[str], tensors: Sequence[Tensor]) -> Tensor:
    """Return statistics of small tensors of one dtype. Shape ``[len(stats), len(tensors)]``."""
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
    has norm 0, and NaN for statistics that need an element.
    """
    if stat == "l2":
        return _numbers.norm(grad)
    how = STATISTICS[stat]
    if grad.numel() == 0:
        return torch.full((), how.empty, device=grad.device)
    elements = _numbers.values(grad)
    if elements.numel() == 0:  # a sparse gradient without stored elements is all zero
        elements = elements.new_zeros(1)
    elements = _numbers.in_float32(elements)
    return how.measure(elements, grad.numel() - elements.numel()).to(torch.float32)


def merge_of(stat: str) -> Callable[[Tensor], Tensor]:
    """Return the function that maps the numbers of shards, ``[ranks, n, k]`` in float64, to ``[n]``."""
    merge = STATISTICS[stat].merge
    return _MERGES[merge] if isinstance(merge, str) else merge


def parts(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return numbers for `merge_of`, from this rank's shard of each gradient. Shape ``[len(grads), k]``, float64."""
    return torch.stack([_part(stat, _dist.local(grad)) for grad in grads])


def _part(stat: str, shard: Tensor) -> Tensor:
    how = STATISTICS[stat]
    if how.part is not None:
        numbers = how.part(_numbers.in_float32(shard.detach()))
        return torch.stack(
            [torch.as_tensor(one, dtype=torch.float64, device=shard.device) for one in numbers]
        )
    if not shard.numel():
        neutral = _NEUTRAL[how.merge] if isinstance(how.merge, str) else 0.0
        return torch.full((1,), neutral, dtype=torch.float64, device=shard.device)
    return statistic(stat, shard).double()[None]


def _of_shards(stat: str, grads: Sequence[Tensor]) -> Tensor:
    settled = [_dist.settled(grad) for grad in grads]
    merged = _dist.over_ranks(settled, parts(stat, settled), merge_of(stat))
    empty = [not grad.numel() for grad in settled]
    if any(empty):
        merged[torch.tensor(empty, device=merged.device)] = STATISTICS[stat].empty
    return merged
