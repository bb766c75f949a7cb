"""Numbers taken of many gradients at once; those of a sharded gradient are of the whole of it.

Every rank measures its own parts, and what belongs together is put together in one collective for all
tensors. All ranks must come here with the same tensors in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    """Non-finite elements of one gradient, ``NaN`` or ``Inf``; 0 where the number is not known."""

    kind: str
    number: int
    # Those whose part of a sharded gradient holds some; empty where all hold the same.
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
    return _numbers.Shards(grads).norms(order).float()


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, float32.

    On the host where they come from several devices: one record needs one place.
    """
    if len({grad.device for grad in grads}) > 1:
        return torch.cat([statistics(stat, [grad]).cpu() for grad in grads])
    return _statistics.statistics(stat, grads)


def counts(grads: Mapping[int, Tensor]) -> dict[int, NonfiniteCount]:
    """Return how many elements are not finite, of the gradients where some are not. Waits."""
    settled = {tensor: _dist.settled(grad) for tensor, grad in grads.items()}
    sharded = {tensor: grad for tensor, grad in settled.items() if _dist.spread(grad)}
    by_tensor = _sharded_counts(sharded) if sharded else {}
    for tensor, grad in settled.items():
        if tensor not in sharded:
            kind, number = _numbers.first_nonfinite(_dist.local(grad))
            if number:
                by_tensor[tensor] = NonfiniteCount(kind, number)
    return dict(sorted(by_tensor.items()))


def _sharded_counts(grads: Mapping[int, Tensor]) -> dict[int, NonfiniteCount]:
    rows = []
    for part in map(_dist.local, grads.values()):
        # One column per rank, so that everybody learns whose part it is.
        row = torch.zeros(_dist.world(), 2, dtype=torch.int64, device=part.device)
        row[_dist.rank()] = torch.stack([part.isnan().sum(), part.isinf().sum()])
        rows.append(row)
    table = _dist.sums(list(grads.values()), torch.stack(rows)).tolist()
    by_tensor = {}
    for tensor, row in zip(grads, table, strict=True):
        nans, infs = map(sum, zip(*row, strict=True))
        if nans or infs:
            ranks = tuple(rank for rank, counts in enumerate(row) if any(counts))
            by_tensor[tensor] = NonfiniteCount("NaN" if nans else "Inf", nans or infs, ranks)
    return by_tensor


def nonfinite(*several: Norms) -> list[list[int]]:
    """Return the tensors whose norm is not finite, of each. Reads each device once."""
    bad: list[list[int]] = [[] for _ in several]
    parts = [(into, *part) for into, norms in zip(bad, several, strict=True) for part in norms]
    for group, values in _by_device(parts, [values for _, _, values in parts]):
        # The numbers themselves: to ask a device which are bad would be a second wait.
        numbers = torch.cat(list(values)).tolist()
        # Nearly always all are finite, and so is their sum.
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
