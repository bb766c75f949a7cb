"""Measures gradients of any layout and dtype, many at once: norms, statistics, and non-finite elements.

Those of sharded gradients take one collective: all ranks must call them with the same tensors in the same order.
`plain_norms`, `parts` and `counts` measure what this rank holds, without a collective.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from gradsurgeon.tensors import _dist, _numbers, _torch
from gradsurgeon.tensors.statistics import STATISTICS, of_column

Item = TypeVar("Item")
_device_of: Callable[[Tensor], torch.device] = attrgetter("device")
# One tensor per device, with the indices of the parameters whose norms it holds.
Norms = tuple[tuple[tuple[int, ...], Tensor], ...]
# A copy of a small tensor, or the `numbers` of another one.
Kept = Tensor | tuple[Tensor, ...]

# By the way of merging shards: the number of an empty shard, for a statistic without a `part` function, and the function.
_MERGES: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "sum": (0.0, lambda parts: parts[..., 0].sum(0)),
    "max": (-math.inf, lambda parts: parts[..., 0].amax(0)),
    "min": (math.inf, lambda parts: parts[..., 0].amin(0)),
}


@dataclass(frozen=True, slots=True)
class NonfiniteCount:
    """The number of non-finite elements of one gradient, all ``NaN`` or ``Inf``; 0 if the number is unknown."""

    kind: str
    number: int


def norms(
    indices: Sequence[int],
    grads: Sequence[Tensor],
    order: float = 2.0,
    *,
    scale: Tensor | None = None,
) -> Norms:
    """Return the norms of gradients, float32, without the scale of a `GradScaler`."""
    if not _dist.any_sharded(grads):
        return plain_norms(indices, grads, order, scale=scale)
    return _norms_by_device(_norms_of_shards, indices, grads, order, scale)


def plain_norms(
    indices: Sequence[int],
    grads: Sequence[Tensor],
    order: float = 2.0,
    *,
    scale: Tensor | None = None,
) -> Norms:
    """Return `norms` of gradients of which this rank holds all, or of the parts that it holds."""
    return _norms_by_device(_numbers.norms, indices, grads, order, scale)


def _norms_by_device(
    measure: Callable[[Sequence[Tensor], float], Tensor],
    indices: Sequence[int],
    grads: Sequence[Tensor],
    order: float,
    scale: Tensor | None,
) -> Norms:
    norms = []
    for part, group in _by_device(indices, grads):
        values = measure(group, order)
        if scale is not None:
            values = values / scale.to(values.device)
        norms.append((tuple(part), values))
    return tuple(norms)


def _by_device(
    items: Sequence[Item], tensors: Sequence[Tensor]
) -> list[tuple[Sequence[Item], Sequence[Tensor]]]:
    if len(set(map(_device_of, tensors))) <= 1:
        return [(items, tensors)] if tensors else []
    groups: dict[torch.device, tuple[list[Item], list[Tensor]]] = {}
    for item, tensor in zip(items, tensors, strict=True):
        part, group = groups.setdefault(tensor.device, ([], []))
        part.append(item)
        group.append(tensor)
    return list(groups.values())


@torch.no_grad()
def _norms_of_shards(grads: Sequence[Tensor], order: float) -> Tensor:
    settled = [_dist.settled(grad) for grad in grads]
    own = _numbers.norms(_dist.parts(settled), order).double()

    def merge(parts: Tensor) -> Tensor:
        # Powers of float32 norms do not overflow in float64.
        each = parts[..., 0]
        return each.amax(0) if math.isinf(order) else (each**order).sum(0).pow(1.0 / order)

    return _dist.over_ranks(settled, own[:, None], merge).float()


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, or ``[len(grads), k]`` if it has k columns; float32."""
    if len({grad.device for grad in grads}) > 1:
        return torch.cat([statistics(stat, [grad]).cpu() for grad in grads])
    with torch.no_grad():
        if _dist.any_sharded(grads):
            settled = [_dist.settled(grad) for grad in grads]
            merged = _over_ranks(stat, settled)
            if any(empty := [not grad.numel() for grad in settled]):
                merged[torch.tensor(empty, device=merged.device)] = STATISTICS[stat].empty
            return merged.float()
        return _each(stat, grads)


def _over_ranks(stat: str, settled: Sequence[Tensor]) -> Tensor:
    merge = merge_of(stat)
    own = parts(stat, settled)
    if not STATISTICS[stat].columns:
        return _dist.over_ranks(settled, own, merge)
    columns = torch.split(own, 1, dim=1)
    return torch.stack([_dist.over_ranks(settled, one, merge) for one in columns], dim=1)


def _each(stat: str, grads: Sequence[Tensor]) -> Tensor:
    if stat == "l2":
        return _numbers.norms(grads)
    return torch.stack([statistic(stat, grad) for grad in grads])


def of_kept(stats: Sequence[str], kept: Sequence[Kept]) -> Tensor:
    """Return statistics of copies and of measured tensors, a row for each column of each statistic.

    The result is on the host if they are on several devices.
    """
    kinds: dict[torch.dtype | None, list[int]] = {}
    for position, one in enumerate(kept):
        kinds.setdefault(one.dtype if isinstance(one, Tensor) else None, []).append(position)
    parts = []
    for positions in kinds.values():
        copies = [one for p in positions if isinstance(one := kept[p], Tensor)]
        if copies:
            with torch.no_grad():
                rows = [_each(stat, copies).view(len(copies), -1).t() for stat in stats]
            parts.append(torch.cat(rows))
        else:
            found = _together(list(chain.from_iterable(kept[p] for p in positions)))
            parts.append(torch.stack(found).view(len(positions), -1).t())
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor(list(chain.from_iterable(kinds.values())), device="cpu")
    return torch.cat(_together(parts), dim=1)[:, order.argsort()]


def _together(tensors: list[Tensor]) -> list[Tensor]:
    return [one.cpu() for one in tensors] if len({one.device for one in tensors}) > 1 else tensors


def numbers(stats: Sequence[str], tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers of all columns of some statistics of a plain gradient, as 0-dim float32 tensors."""
    found: list[Tensor] = []
    for stat in stats:
        number = statistic(stat, tensor)
        found += number.unbind() if number.dim() else (number,)
    return tuple(found)


def statistic(stat: str, grad: Tensor) -> Tensor:
    """Return one statistic of a plain gradient as a 0-dim float32 tensor on its device, or a tensor of its columns."""
    if stat == "l2":
        return _numbers.norm(grad)
    how = STATISTICS[stat]
    if how.whole is not None:
        return how.whole(grad).float()
    if grad.numel() == 0:
        return torch.full((), how.empty, device=grad.device)
    elements = _numbers.values(grad)
    if elements.numel() == 0:  # a sparse gradient without stored elements is all zero
        elements = elements.new_zeros(1)
    elements = _numbers.in_float32(elements)
    return how.measure(elements, grad.numel() - elements.numel()).to(torch.float32)


def merge_of(stat: str) -> Callable[[Tensor], Tensor]:
    """Return the function that maps the numbers of shards, ``[ranks, n, k]`` in float64, to ``[n]``.

    ``stat`` is a statistic, or one of its columns.
    """
    merge = of_column(stat).merge
    return _MERGES[merge][1] if isinstance(merge, str) else merge


def parts(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return numbers for `merge_of`, from this rank's shard of each gradient. Shape ``[len(grads), k]``, float64."""
    whole = STATISTICS[stat].whole
    found = [_part(stat, _dist.local(grad)) if whole is None else whole(grad) for grad in grads]
    return torch.stack(_together(found))


def _part(stat: str, shard: Tensor) -> Tensor:
    how = STATISTICS[stat]
    if how.part is not None:
        numbers = how.part(_numbers.in_float32(shard.detach()))
        return torch.stack(
            [torch.as_tensor(one, dtype=torch.float64, device=shard.device) for one in numbers]
        )
    if not shard.numel():
        neutral = _MERGES[how.merge][0] if isinstance(how.merge, str) else 0.0
        return torch.full((1,), neutral, dtype=torch.float64, device=shard.device)
    return statistic(stat, shard).double()[None]


def counts(grads: Mapping[int, Tensor]) -> dict[int, NonfiniteCount]:
    """Count the non-finite elements in the local part of each gradient; skip finite gradients. Waits."""
    by_index = {}
    for index, grad in sorted(grads.items()):
        kind, number = _numbers.first_nonfinite(_dist.local(grad))
        if number:
            by_index[index] = NonfiniteCount(kind, number)
    return by_index


def nonfinite(*several: Norms) -> list[list[int]]:
    """Return, for each argument, the tensors with a non-finite norm. Reads each device once."""
    bad: list[list[int]] = []
    parts: list[tuple[list[int], tuple[int, ...]]] = []
    measured: list[Tensor] = []
    for norms in several:
        into: list[int] = []
        bad.append(into)
        for indices, values in norms:
            parts.append((into, indices))
            measured.append(values)
    for group, all_values in _by_device(parts, measured):
        # All numbers are read: asking the device which are bad would be a second wait.
        numbers = torch.cat(list(all_values)).tolist()
        # Nearly always all numbers are finite, and so is their sum.
        if math.isfinite(sum(numbers)):
            continue
        rest = iter(numbers)
        for into, indices in group:
            into += [t for t, norm in zip(indices, rest, strict=False) if not math.isfinite(norm)]
    return bad


def picked(values: Tensor, measured: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Return the numbers of some tensors, given those of more. Does not wait for the device."""
    place = {index: number for number, index in enumerate(measured)}
    places = tuple([place[index] for index in wanted])
    return values[_torch.integers(places, values.device)]


def among(norms: Norms, indices: Collection[int]) -> Norms:
    """Return the norms of some tensors, given those of more."""
    chosen = []
    for measured, values in norms:
        wanted = tuple(index for index in measured if index in indices)
        if wanted:
            chosen.append((wanted, picked(values, measured, wanted)))
    return tuple(chosen)


def as_dict(norms: Norms) -> dict[int, float]:
    """Return the norms as numbers by tensor. Waits for the device."""
    return {
        index: norm
        for indices, values in norms
        for index, norm in zip(indices, values.tolist(), strict=True)
    }


def read(counts: Sequence[Tensor]) -> list[int]:
    """Return 0-dim counts or flags as numbers: one wait per device."""
    numbers: dict[int, int] = {}
    for positions, group in _by_device(range(len(counts)), counts):
        numbers.update(zip(positions, torch.stack(list(group)).tolist(), strict=True))
    return [numbers[position] for position in range(len(counts))]
