"""Measures gradients of any layout and dtype, many at once: norms, statistics, and non-finite elements.

Those of sharded gradients take one collective: all ranks must call them with the same tensors in the same order.
`parts` and `counts` measure what this rank holds, without a collective.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradsurgeon.tensors import _dist, _nonfinite, _numbers, _torch
from gradsurgeon.tensors._dist import Tensors
from gradsurgeon.tensors.statistics import STATISTICS, of_column

Item = TypeVar("Item")
_device_of: Callable[[Tensor], torch.device] = attrgetter("device")
# One tensor per device, with the indices of the parameters whose norms it holds.
Norms = tuple[tuple[tuple[int, ...], Tensor], ...]
# A copy of a small tensor, or the `numbers` of another one.
Kept = Tensor | tuple[Tensor, ...]

# Statistics without `whole` that take as many launches for many tensors as for one.
_TOGETHER = {"l2", "numel"}
# Statistics that take half precision as it is.
_OF_ANY_DTYPE = {"numel", "nonfinite"}
# There are non-finite elements, and nobody has counted them.
UNCOUNTED = -1
# The number of an empty shard, for a statistic without a `part` function, by the way of merging shards; 0 for others.
_NEUTRAL: dict[object, float] = {"max": -math.inf, "min": math.inf}
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


@dataclass(frozen=True, slots=True)
class NonfiniteCount:
    """The number of non-finite elements of one gradient, all ``NaN`` or ``Inf``; 0 if the number is unknown."""

    kind: str
    number: int


def norms(
    indices: Sequence[int],
    grads: Tensors,
    order: float = 2.0,
    *,
    scale: Tensor | None = None,
) -> Norms:
    """Return the norms of gradients, float32, without the scale of a `GradScaler`."""
    norms_of = _norms_of_shards if _dist.any_sharded(grads) else _numbers.norms
    by_device = []
    for group_indices, group in _by_device(indices, grads):
        values = norms_of(group, order)
        if scale is not None:
            values = values / scale.to(values.device)
        by_device.append((tuple(group_indices), values))
    return tuple(by_device)


def magnitudes(indices: Sequence[int], grads: Tensors) -> Norms:
    """Return a number of each strided gradient: NaN or infinite exactly if an element is, and then of the same kind."""
    by_device = []
    for group_indices, group in _by_device(indices, grads):
        by_device.append((tuple(group_indices), _numbers.magnitudes(group)))
    return tuple(by_device)


def _by_device(items: Sequence[Item], tensors: Tensors) -> list[tuple[Sequence[Item], Tensors]]:
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


@_torch.without_grad
def _norms_of_shards(grads: Tensors, order: float) -> Tensor:
    settled = list(map(_dist.settled, grads))
    own = _numbers.norms(_dist.parts(settled), order).double()

    def merge(parts: Tensor) -> Tensor:
        # Powers of float32 norms do not overflow in float64.
        norms = parts[..., 0]
        if math.isinf(order):
            return norms.amax(0)
        return (norms**order).sum(0).pow(1.0 / order)

    return _dist.over_ranks(settled, own[:, None], merge).float()


@_torch.without_grad
def statistics(stat: str, grads: Tensors) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, or ``[len(grads), k]`` if it has k columns; float32."""
    if _are_on_several_devices(grads):
        return torch.cat([statistics(stat, [grad]).cpu() for grad in grads])
    if not _dist.any_sharded(grads):
        return _each(stat, grads)
    settled = list(map(_dist.settled, grads))
    merged = _dist.over_ranks(settled, parts(stat, settled), merge_of(stat))
    empty = [not grad.numel() for grad in settled]
    if any(empty):
        merged[torch.tensor(empty, device=merged.device)] = STATISTICS[stat].empty
    return merged.float()


def _each(stat: str, grads: Tensors) -> Tensor:
    if stat == "l2":
        return _numbers.norms(grads)
    how = STATISTICS[stat]
    if how.whole is not None:
        return how.whole(grads).float()
    return torch.stack([statistic(stat, grad) for grad in grads])


@_torch.without_grad
def of_kept(stats: Sequence[str], kept: Sequence[Kept]) -> Tensor:
    """Return statistics of copies and of measured tensors, a row for each column of each statistic.

    The result is on the host if they are on several devices.
    """
    # The positions of copies by dtype: those of different dtypes are not measured together.
    positions_of = defaultdict(list)
    for position, item in enumerate(kept):
        positions_of[getattr(item, "dtype", None)].append(position)
    columns = []
    for dtype, positions in positions_of.items():
        items: Sequence[Any] = [kept[position] for position in positions]
        if dtype is None:
            numbers = torch.stack(_on_one_device([*chain(*items)]))
            columns.append(numbers.view(len(items), -1).t())
        else:
            rows = [_each(stat, items).view(len(items), -1).t() for stat in stats]
            columns.append(torch.cat(rows))
    if len(columns) == 1:
        return columns[0]
    joined = torch.cat(_on_one_device(columns), dim=1)
    order = [*chain(*positions_of.values())]
    return picked(joined.t(), order, range(len(order))).t()


def is_kept(stats: Sequence[str], tensor: Tensor) -> bool:
    """Return whether copying a plain tensor costs less than its statistics, as those of many copies are taken together."""
    if tensor.is_cpu:
        return _numbers.is_small(tensor)
    # A launch takes as long as the copy of a small tensor.
    if len(stats) == 1 or not _numbers.is_few(tensor):
        return False
    return all(stat in _TOGETHER or STATISTICS[stat].whole is not None for stat in stats)


def _on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors as they are, or on the host if they are on several devices."""
    if _are_on_several_devices(tensors):
        return [tensor.cpu() for tensor in tensors]
    return tensors


def _are_on_several_devices(tensors: Tensors) -> bool:
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
    if stat not in _OF_ANY_DTYPE:
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
        return partial(_merged, _REDUCTIONS[merge])
    return merge


def joined(stat: str, values: Tensor) -> Tensor:
    """Return the number of several tensors together, shape ``[1]``, from the number of each."""
    return merge_of(stat)(values.double().reshape(-1, 1, 1)).float()


def _merged(reduce: Callable[..., Tensor], parts: Tensor) -> Tensor:
    return reduce(parts[..., 0], 0)


def parts(stat: str, grads: Tensors) -> Tensor:
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
        return torch.full(
            (1,), _NEUTRAL.get(how.merge, 0.0), dtype=torch.float64, device=shard.device
        )
    return statistic(stat, shard).double()[None]


def _in_float64(number: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device=device)


def counts(grads: Mapping[int, Tensor]) -> dict[int, NonfiniteCount]:
    """Count the non-finite elements in the local part of each gradient; skip finite gradients. Waits."""
    by_index = {}
    for index, grad in sorted(grads.items()):
        kind, number = _nonfinite.first_nonfinite(_dist.local(grad))
        if number:
            by_index[index] = NonfiniteCount(kind, number)
    return by_index


def norm_tensors(*several: Norms) -> list[Tensor]:
    """Return the tensors that hold some norms, in their order."""
    tensors: list[Tensor] = []
    for norms in several:
        tensors += [values for _, values in norms]
    return tensors


def nonfinite(*several: Norms) -> list[list[int]]:
    """Return, for each argument, the tensors with a non-finite norm. Reads each device once."""
    numbers = iter(_read(norm_tensors(*several)))
    bad = []
    for norms in several:
        bad_indices: list[int] = []
        for indices, _ in norms:
            values = next(numbers)
            # Nearly always all numbers are finite, and so is their sum.
            if not math.isfinite(sum(values)):
                for index, value in zip(indices, values, strict=True):
                    if not math.isfinite(value):
                        bad_indices.append(index)
        bad.append(bad_indices)
    return bad


def together(norms: Norms, indices: Sequence[int]) -> Tensor:
    """Return the norms of some parameters in one tensor."""
    if len(norms) != 1:
        # Norms of several devices: one record needs them on one device, and that is the host.
        by_index = as_dict(norms)
        return torch.tensor([by_index[index] for index in indices])
    ((measured, values),) = norms
    if len(measured) == len(indices):
        return values
    return picked(values, measured, indices)


def picked(values: Tensor, measured: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Return the numbers, or rows, of some tensors, given those of more. Does not wait for the device."""
    place_of = {index: place for place, index in enumerate(measured)}
    places = tuple([place_of[index] for index in wanted])
    return values[_torch.integers(places, values.device)]


def among(norms: Norms, indices: Collection[int]) -> Norms:
    """Return the norms of some tensors, given those of more."""
    chosen = []
    for measured, values in norms:
        wanted = tuple([index for index in measured if index in indices])
        if len(wanted) == len(measured):
            chosen.append((measured, values))
        elif wanted:
            chosen.append((wanted, picked(values, measured, wanted)))
    return tuple(chosen)


def as_dict(norms: Norms) -> dict[int, float]:
    """Return the norms as numbers by tensor. Waits for the device."""
    by_index: dict[int, float] = {}
    for indices, values in norms:
        by_index.update(zip(indices, values.tolist(), strict=True))
    return by_index


def read_marks(marks: Tensors) -> list[int]:
    """Return 0 for each mark of a tensor whose elements are all finite, and `UNCOUNTED` for others."""
    counts = []
    for (mark,) in _read(marks):
        is_finite = math.isfinite(mark)
        counts.append(0 if is_finite else UNCOUNTED)
    return counts


def read(counts: Tensors) -> list[int]:
    """Return 0-dim counts or flags as numbers: one wait per device."""
    return [int(number) for (number,) in _read(counts)]


def _read(parts: Tensors) -> list[list[float]]:
    """Return the numbers of tensors on several devices. Reads each device once."""
    if len(parts) == 1:  # nearly always
        return [parts[0].reshape(-1).tolist()]
    numbers_of = {}
    for positions, group in _by_device(range(len(parts)), parts):
        numbers = iter(torch.cat([part.reshape(-1) for part in group]).tolist())
        for position, part in zip(positions, group, strict=True):
            numbers_of[position] = list(islice(numbers, part.numel()))
    return [numbers_of[position] for position in range(len(parts))]
