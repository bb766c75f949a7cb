"""Measures gradients of any layout and dtype, many at once: norms, statistics, and non-finite elements.

Those of sharded gradients take one collective: all ranks must call them with the same tensors in the same order.
`plain_norms`, `parts` and `counts` measure what this rank holds, without a collective.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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

# The number of an empty shard, for a statistic without a `part` function, by the way of merging shards.
_NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


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
    for group_indices, group in _by_device(indices, grads):
        values = measure(group, order)
        if scale is not None:
            values = values / scale.to(values.device)
        norms.append((tuple(group_indices), values))
    return tuple(norms)


def _by_device(
    items: Sequence[Item], tensors: Sequence[Tensor]
) -> list[tuple[Sequence[Item], Sequence[Tensor]]]:
    if not tensors:
        return []
    # A loop would take three times as long.
    devices = set(map(_device_of, tensors))
    if len(devices) == 1:
        return [(items, tensors)]
    groups: dict[torch.device, tuple[list[Item], list[Tensor]]] = {}
    for item, tensor in zip(items, tensors, strict=True):
        group_items, group = groups.setdefault(tensor.device, ([], []))
        group_items.append(item)
        group.append(tensor)
    return list(groups.values())


@torch.no_grad()
def _norms_of_shards(grads: Sequence[Tensor], order: float) -> Tensor:
    settled = [_dist.settled(grad) for grad in grads]
    own = _numbers.norms(_dist.parts(settled), order).double()

    def merge(parts: Tensor) -> Tensor:
        # Powers of float32 norms do not overflow in float64.
        norms = parts[..., 0]
        if math.isinf(order):
            return norms.amax(0)
        return (norms**order).sum(0).pow(1.0 / order)

    return _dist.over_ranks(settled, own[:, None], merge).float()


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, or ``[len(grads), k]`` if it has k columns; float32."""
    if _are_on_several_devices(grads):
        return torch.cat([statistics(stat, [grad]).cpu() for grad in grads])
    with torch.no_grad():
        if not _dist.any_sharded(grads):
            return _each(stat, grads)
        settled = [_dist.settled(grad) for grad in grads]
        merged = _over_ranks(stat, settled)
        empty = [not grad.numel() for grad in settled]
        if any(empty):
            merged[torch.tensor(empty, device=merged.device)] = STATISTICS[stat].empty
        return merged.float()


def _over_ranks(stat: str, settled: Sequence[Tensor]) -> Tensor:
    merge = merge_of(stat)
    own = parts(stat, settled)
    if not STATISTICS[stat].columns:
        return _dist.over_ranks(settled, own, merge)
    columns = torch.split(own, 1, dim=1)
    merged = [_dist.over_ranks(settled, column, merge) for column in columns]
    return torch.stack(merged, dim=1)


def _each(stat: str, grads: Sequence[Tensor]) -> Tensor:
    if stat == "l2":
        return _numbers.norms(grads)
    how = STATISTICS[stat]
    if how.whole is not None:
        return how.whole(grads).float()
    return torch.stack([statistic(stat, grad) for grad in grads])


def of_kept(stats: Sequence[str], kept: Sequence[Kept]) -> Tensor:
    """Return statistics of copies and of measured tensors, a row for each column of each statistic.

    The result is on the host if they are on several devices.
    """
    measured: list[int] = []
    numbers: list[Tensor] = []
    # The copies, with their positions; copies of different dtypes are not measured together.
    copies: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for position, item in enumerate(kept):
        if isinstance(item, Tensor):
            positions, group = copies.setdefault(item.dtype, ([], []))
            positions.append(position)
            group.append(item)
        else:
            measured.append(position)
            numbers += item
    order: list[int] = []
    columns: list[Tensor] = []
    for positions, group in copies.values():
        order += positions
        columns.append(_columns_of_copies(stats, group))
    if measured:
        order += measured
        rows = torch.stack(_on_one_device(numbers)).view(len(measured), -1)
        columns.append(rows.t())
    if len(columns) == 1:
        return columns[0]
    joined = torch.cat(_on_one_device(columns), dim=1)
    return joined[:, torch.tensor(order, device="cpu").argsort()]


@torch.no_grad()
def _columns_of_copies(stats: Sequence[str], copies: Sequence[Tensor]) -> Tensor:
    rows = []
    for stat in stats:
        numbers = _each(stat, copies)
        rows.append(numbers.view(len(copies), -1).t())
    return torch.cat(rows)


def _on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors as they are, or on the host if they are on several devices."""
    if _are_on_several_devices(tensors):
        return [tensor.cpu() for tensor in tensors]
    return tensors


def _are_on_several_devices(tensors: Sequence[Tensor]) -> bool:
    return len(set(map(_device_of, tensors))) > 1


def numbers(stats: Sequence[str], tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers of all columns of some statistics of a plain gradient, as 0-dim float32 tensors."""
    columns: list[Tensor] = []
    for stat in stats:
        number = statistic(stat, tensor)
        if number.dim():
            columns += number.unbind()
        else:
            columns.append(number)
    return tuple(columns)


def statistic(stat: str, grad: Tensor) -> Tensor:
    """Return one statistic of a plain gradient as a 0-dim float32 tensor on its device, or a tensor of its columns."""
    if stat == "l2":
        return _numbers.norm(grad)
    how = STATISTICS[stat]
    if how.whole is not None:
        return how.whole([grad])[0].float()
    if grad.numel() == 0:
        return torch.full((), how.empty, device=grad.device)
    elements = _numbers.values(grad)
    if elements.numel() == 0:  # a sparse gradient without stored elements is all zero
        elements = elements.new_zeros(1)
    elements = _numbers.in_float32(elements)
    missing = grad.numel() - elements.numel()
    assert how.measure is not None  # noqa: S101 # `whole` takes its place above
    return how.measure(elements, missing).to(torch.float32)


def merge_of(stat: str) -> Callable[[Tensor], Tensor]:
    """Return the function that maps the numbers of shards, ``[ranks, n, k]`` in float64, to ``[n]``.

    ``stat`` is a statistic, or one of its columns.
    """
    merge = of_column(stat).merge
    if isinstance(merge, str):
        return _MERGES[merge]
    return merge


def joined(stat: str, values: Tensor) -> Tensor:
    """Return the number of several tensors together, shape ``[1]``, from the number of each."""
    wide = _in_float64(values, values.device)
    return merge_of(stat)(wide.reshape(-1, 1, 1)).float()


def _summed(parts: Tensor) -> Tensor:
    return parts[..., 0].sum(0)


def _largest(parts: Tensor) -> Tensor:
    return parts[..., 0].amax(0)


def _smallest(parts: Tensor) -> Tensor:
    return parts[..., 0].amin(0)


_MERGES = {"sum": _summed, "max": _largest, "min": _smallest}


def parts(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return numbers for `merge_of`, from this rank's shard of each gradient. Shape ``[len(grads), k]``, float64."""
    return torch.stack(_on_one_device([_part(stat, grad) for grad in grads]))


def _part(stat: str, grad: Tensor) -> Tensor:
    how = STATISTICS[stat]
    if how.whole is not None:
        return how.whole([grad])[0]
    shard = _dist.local(grad)
    if how.part is not None:
        numbers = how.part(_numbers.in_float32(shard.detach()))
        return torch.stack([_in_float64(number, shard.device) for number in numbers])
    if not shard.numel():
        neutral = 0.0
        if isinstance(how.merge, str):
            neutral = _NEUTRAL[how.merge]
        return torch.full((1,), neutral, dtype=torch.float64, device=shard.device)
    return statistic(stat, shard).double()[None]


def _in_float64(number: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device=device)


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
    # For each tensor of norms, the list for its bad indices, and all its indices.
    parts: list[tuple[list[int], tuple[int, ...]]] = []
    measured: list[Tensor] = []
    for norms in several:
        bad_indices: list[int] = []
        bad.append(bad_indices)
        for indices, values in norms:
            parts.append((bad_indices, indices))
            measured.append(values)
    for group, all_values in _by_device(parts, measured):
        # All numbers are read: asking the device which are bad would be a second wait.
        numbers = torch.cat(list(all_values)).tolist()
        # Nearly always all numbers are finite, and so is their sum.
        if math.isfinite(sum(numbers)):
            continue
        remaining = iter(numbers)
        for bad_indices, indices in group:
            for index in indices:
                if not math.isfinite(next(remaining)):
                    bad_indices.append(index)
    return bad


def picked(values: Tensor, measured: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Return the numbers of some tensors, given those of more. Does not wait for the device."""
    place_of = {index: place for place, index in enumerate(measured)}
    places = tuple([place_of[index] for index in wanted])
    return values[_torch.integers(places, values.device)]


def among(norms: Norms, indices: Collection[int]) -> Norms:
    """Return the norms of some tensors, given those of more."""
    chosen = []
    for measured, values in norms:
        wanted = tuple([index for index in measured if index in indices])
        if wanted:
            chosen.append((wanted, picked(values, measured, wanted)))
    return tuple(chosen)


def as_dict(norms: Norms) -> dict[int, float]:
    """Return the norms as numbers by tensor. Waits for the device."""
    by_index: dict[int, float] = {}
    for indices, values in norms:
        by_index.update(zip(indices, values.tolist(), strict=True))
    return by_index


def read(counts: Sequence[Tensor]) -> list[int]:
    """Return 0-dim counts or flags as numbers: one wait per device."""
    numbers: dict[int, int] = {}
    positions = range(len(counts))
    for group_positions, group in _by_device(positions, counts):
        values = torch.stack(list(group)).tolist()
        numbers.update(zip(group_positions, values, strict=True))
    return [numbers[position] for position in positions]
