"""Measures many gradients at once.

Norms and statistics of sharded gradients describe whole gradients: every rank measures its own parts, and one
collective merges the numbers of all tensors. All ranks must call it with the same tensors in the same order.
`norms_here` and `counts` measure what this rank holds, without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _statistics

Item = TypeVar("Item")
# One tensor per device, with the indices of the parameters whose norms it holds.
Norms = tuple[tuple[tuple[int, ...], Tensor], ...]


@dataclass(frozen=True, slots=True)
class NonfiniteCount:
    """The number of non-finite elements of one gradient, all ``NaN`` or ``Inf``; 0 if the number is unknown."""

    kind: str
    number: int
    # The ranks whose shard holds such elements; empty if all ranks hold the same gradient.
    ranks: tuple[int, ...] = ()


def norms(
    tensors: Sequence[int],
    grads: Sequence[Tensor],
    order: float = 2.0,
    *,
    scale: Tensor | None = None,
) -> Norms:
    """Return the norms of gradients, float32, without the scale of a `GradScaler`."""
    measure = _norms_of_shards if _dist.any_sharded(grads) else _numbers.norms
    with torch.no_grad():
        parts = [(tuple(part), measure(group, order)) for part, group in _by_device(tensors, grads)]
        if scale is not None:
            parts = [(part, values / scale.to(values.device)) for part, values in parts]
    return tuple(parts)


def norms_here(
    tensors: Sequence[int], grads: Sequence[Tensor], *, scale: Tensor | None = None
) -> Norms:
    """Return `norms` of the part that this rank holds of each gradient, even if other ranks hold other parts."""
    return norms(tensors, _dist.parts(grads), scale=scale)


def _by_device(
    items: Sequence[Item], tensors: Sequence[Tensor]
) -> list[tuple[Sequence[Item], Sequence[Tensor]]]:
    if len({tensor.device for tensor in tensors}) <= 1:
        return [(items, tensors)] if tensors else []
    groups: dict[torch.device, tuple[list[Item], list[Tensor]]] = {}
    for item, tensor in zip(items, tensors, strict=True):
        part, group = groups.setdefault(tensor.device, ([], []))
        part.append(item)
        group.append(tensor)
    return list(groups.values())


def _norms_of_shards(grads: Sequence[Tensor], order: float) -> Tensor:
    settled = [_dist.settled(grad) for grad in grads]
    own = _numbers.norms(_dist.parts(settled), order).double()

    def merge(parts: Tensor) -> Tensor:
        # Powers of float32 norms do not overflow in float64.
        each = parts[..., 0]
        return each.amax(0) if math.isinf(order) else (each**order).sum(0).pow(1.0 / order)

    return _dist.over_ranks(settled, own[:, None], merge).float()


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, float32.

    The result is on the host if the gradients come from several devices, because one record needs one place.
    """
    if len({grad.device for grad in grads}) > 1:
        return torch.cat([statistics(stat, [grad]).cpu() for grad in grads])
    return _statistics.statistics(stat, grads)


def parts(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return numbers of the local shards that merging a statistic needs. Shape ``[len(grads), k]``, float64."""
    if len({_dist.local(grad).device for grad in grads}) > 1:
        return torch.cat([_statistics.parts(stat, [grad]).cpu() for grad in grads])
    return _statistics.parts(stat, grads)


def counts(grads: Mapping[int, Tensor]) -> dict[int, NonfiniteCount]:
    """Count the non-finite elements in the local part of each gradient; skip finite gradients. Waits."""
    by_tensor = {}
    for tensor, grad in sorted(grads.items()):
        kind, number = _numbers.first_nonfinite(_dist.local(grad))
        if number:
            ranks = (_dist.rank(),) if _dist.spread(grad) else ()
            by_tensor[tensor] = NonfiniteCount(kind, number, ranks)
    return by_tensor


def merged(counts: Iterable[NonfiniteCount]) -> NonfiniteCount:
    """Merge the counts of several ranks, each for its own part of one gradient."""
    found = list(counts)
    kind = "NaN" if any(one.kind == "NaN" for one in found) else "Inf"
    ranks = sorted({rank for one in found for rank in one.ranks})
    return NonfiniteCount(kind, sum(one.number for one in found if one.kind == kind), (*ranks,))


def nonfinite(*several: Norms) -> list[list[int]]:
    """Return, for each argument, the tensors with a non-finite norm. Reads each device once."""
    bad: list[list[int]] = [[] for _ in several]
    parts = [(into, *part) for into, norms in zip(bad, several, strict=True) for part in norms]
    for group, values in _by_device(parts, [values for _, _, values in parts]):
        # All numbers are read: asking the device which are bad would be a second wait.
        numbers = torch.cat(list(values)).tolist()
        # Nearly always all numbers are finite, and so is their sum.
        if math.isfinite(sum(numbers)):
            continue
        rest = iter(numbers)
        for into, tensors, _ in group:
            into += [t for t, norm in zip(tensors, rest, strict=False) if not math.isfinite(norm)]
    return bad


def as_dict(norms: Norms) -> dict[int, float]:
    """Return the norms as numbers by tensor. Waits for the device."""
    return {
        tensor: norm
        for tensors, values in norms
        for tensor, norm in zip(tensors, values.tolist(), strict=True)
    }


def read(counts: Sequence[Tensor]) -> list[int]:
    """Return 0-dim counts or flags as numbers: one wait per device."""
    numbers: dict[int, int] = {}
    for positions, group in _by_device(range(len(counts)), counts):
        numbers.update(zip(positions, torch.stack(list(group)).tolist(), strict=True))
    return [numbers[position] for position in range(len(counts))]
