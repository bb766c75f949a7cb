"""Numbers taken of many gradients at once; those of a sharded gradient are of the whole of it.

Every rank measures its own parts, and what belongs together is put together in one collective for all
tensors. All ranks must come here with the same tensors in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _statistics, _torch

Norms = tuple[tuple[tuple[int, ...], Tensor], ...]


@dataclass(frozen=True, slots=True)
class Count:
    """Non-finite elements of one gradient.

    Attributes:
        kind: ``NaN``, ``Inf``, or ``NaN/Inf`` where it is not known which.
        number: of such elements, 0 where it is not known.
        ranks: those whose part of a sharded gradient holds some; empty where all hold the same.
    """

    kind: str
    number: int
    ranks: tuple[int, ...] = ()


def norms(
    tensors: Sequence[int],
    grads: Sequence[Tensor],
    order: float = 2.0,
    *,
    scale: Tensor | None = None,
) -> Norms:
    """Return the norms of gradients, float32; one tensor per device, with the tensors it covers.

    Args:
        tensors: their indices.
        grads: the gradients.
        order: of the norm.
        scale: what a `GradScaler` has multiplied them by; the norms are without it.
    """
    if not grads:
        return ()
    if scale is not None:
        found = norms(tensors, grads, order)
        return tuple((own, values / scale.to(values.device)) for own, values in found)
    sharded = _dist.any_sharded(grads)
    if sharded:
        grads = [_dist.settled(grad) for grad in grads]
    own = _norms if sharded else _numbers.norms
    with torch.no_grad():
        if len({grad.device for grad in grads}) == 1:
            return ((tuple(tensors), own(grads, order)),)
        devices: dict[torch.device, list[int]] = {}
        for position, grad in enumerate(grads):
            devices.setdefault(grad.device, []).append(position)
        return tuple(
            (
                tuple(tensors[position] for position in positions),
                own([grads[position] for position in positions], order),
            )
            for positions in devices.values()
        )


def _norms(grads: Sequence[Tensor], order: float) -> Tensor:
    found = _numbers.norms([_dist.local(grad) for grad in grads], order)
    if math.isinf(order):
        return _maximum(grads, found)
    # Powers of float32 norms do not overflow in float64.
    return _sum(grads, found.double() ** order).pow(1.0 / order).float()


def _sum(grads: Sequence[Tensor], parts: Tensor) -> Tensor:
    """Add up what the ranks have found of each gradient; plain ones keep what they have."""
    return _merged(grads, parts, "sum")


def _maximum(grads: Sequence[Tensor], parts: Tensor) -> Tensor:
    """Take the largest of what the ranks have found of each gradient; NaN stays NaN."""
    # Whether a backend's maximum keeps NaN is nowhere promised.
    bad = parts.isnan()
    both = torch.stack([parts.nan_to_num(-math.inf, math.inf, -math.inf), bad.to(parts.dtype)], 1)
    found = _merged(grads, both, "max")
    return torch.where(found[:, 1] > 0, torch.full_like(found[:, 0], math.nan), found[:, 0])


def _merged(grads: Sequence[Tensor], parts: Tensor, op: _dist.Op) -> Tensor:
    together: dict[_dist.Groups, list[int]] = {}
    for place, grad in enumerate(grads):
        if groups := _dist.spread(grad):
            together.setdefault(groups, []).append(place)
    out = parts.clone()
    for groups, places in together.items():
        index = torch.tensor(places, device=parts.device)
        out[index] = _dist.reduce(parts[index], groups, op)
    return out


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, float32.

    On the host where they come from several devices: one record needs one place.
    """
    if len({grad.device for grad in grads}) > 1:
        return torch.cat([statistics(stat, [grad]).cpu() for grad in grads])
    with torch.no_grad():
        if not any(_dist.is_sharded(grad) for grad in grads):
            return _statistics.statistics(stat, grads)
        grads = [_dist.settled(grad) for grad in grads]
        return _of_shards(stat, grads, [_dist.local(grad) for grad in grads]).float()


def _of_shards(stat: str, grads: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    if stat == "l2":
        return _norms(grads, 2.0)
    if stat in ("linf", "max"):
        return _maximum(grads, _each(stat, parts, empty=-math.inf if stat == "max" else 0.0))
    if stat == "min":
        return -_maximum(grads, -_each(stat, parts, empty=math.inf))
    if stat not in ("mean", "std"):
        return _sum(grads, _each(stat, parts, empty=0.0))
    counts = [grad.numel() for grad in grads]
    sizes = torch.tensor(counts, dtype=torch.float64, device=parts[0].device)
    mean = _sum(grads, torch.stack([part.double().sum() for part in parts])) / sizes
    if stat == "mean":
        return mean
    # Two passes: the difference of the mean square and the squared mean cancels.
    spread = [(part.double() - one).square().sum() for part, one in zip(parts, mean, strict=True)]
    return (_sum(grads, torch.stack(spread)) / sizes).sqrt()


def _each(stat: str, parts: Sequence[Tensor], *, empty: float) -> Tensor:
    """Return a statistic of every part, and what changes nothing for a part without elements."""
    return torch.stack(
        [
            _statistics.statistic(stat, part)
            if part.numel()
            else torch.full((), empty, device=part.device)
            for part in parts
        ]
    ).double()


def counts(grads: Mapping[int, Tensor]) -> dict[int, Count]:
    """Return how many elements are not finite, of the gradients where some are not. Waits."""
    grads = {tensor: _dist.settled(grad) for tensor, grad in grads.items()}
    plain = {tensor: grad for tensor, grad in grads.items() if not _dist.spread(grad)}
    found: dict[int, Count] = {}
    for tensor, grad in plain.items():
        kind, number = _numbers.first_nonfinite(_dist.local(grad))
        if number:
            found[tensor] = Count(kind, number)
    found.update(_sharded_counts({i: grad for i, grad in grads.items() if i not in plain}))
    return dict(sorted(found.items()))


def _sharded_counts(grads: Mapping[int, Tensor]) -> dict[int, Count]:
    if not grads:
        return {}
    own = _dist.rank()
    rows = []
    for grad in grads.values():
        part = _dist.local(grad)
        # One column per rank, so that everybody learns whose part it is.
        row = torch.zeros(_dist.world(), 2, dtype=torch.int64, device=part.device)
        row[own, 0], row[own, 1] = part.isnan().sum(), part.isinf().sum()
        rows.append(row)
    table = _merged(list(grads.values()), torch.stack(rows), "sum").tolist()
    found = {}
    for tensor, row in zip(grads, table, strict=True):
        nans, infs = sum(one[0] for one in row), sum(one[1] for one in row)
        if nans or infs:
            ranks = tuple(place for place, one in enumerate(row) if one[0] or one[1])
            found[tensor] = Count("NaN", nans, ranks) if nans else Count("Inf", infs, ranks)
    return found


def suspects(found: Norms) -> list[int]:
    """Return the tensors whose norm is not finite. Reads each device once."""
    return suspects_of(found)[0]


def suspects_of(*found: Norms) -> list[list[int]]:
    """Return the tensors whose norm is not finite, of each. Reads each device once."""
    bad: list[list[int]] = [[] for _ in found]
    devices: dict[torch.device, list[tuple[int, tuple[int, ...], Tensor]]] = {}
    for place, parts in enumerate(found):
        for tensors, values in parts:
            devices.setdefault(values.device, []).append((place, tensors, values))
    for rows in devices.values():
        both = rows[0][2] if len(rows) == 1 else torch.cat([values for _, _, values in rows])
        # Nearly always all are finite, and so is their sum.
        if _torch.is_host(both) and math.isfinite(both.sum().item()):
            continue
        # The numbers themselves: to ask a device which are bad would be a second wait.
        row = both.tolist()
        if math.isfinite(sum(row)):
            continue
        numbers = iter(row)
        for place, tensors, _ in rows:
            own = zip(tensors, numbers, strict=False)  # the next tensors have the rest
            bad[place] += [tensor for tensor, number in own if not math.isfinite(number)]
    return bad


def pick(found: Norms, wanted: Sequence[int]) -> Tensor:
    """Return the norms of some tensors, in the order asked for."""
    if len(found) == 1:
        tensors, values = found[0]
        if tensors == tuple(wanted):
            return values
        return values[_torch.integers(_places(tensors, tuple(wanted)), values.device)]
    # Several devices: one record needs one place, and that is the host.
    table = as_dict(found)
    return torch.tensor([table[tensor] for tensor in wanted])


# A thousand rules each pick theirs in every step, and the same in each.
@lru_cache(maxsize=4096)
def _places(tensors: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    place = {tensor: number for number, tensor in enumerate(tensors)}
    return tuple([place[tensor] for tensor in wanted])


def as_dict(found: Norms) -> dict[int, float]:
    """Return the norms as numbers by tensor. Waits for the device."""
    return {i: float(v) for own, row in found for i, v in zip(own, row.tolist(), strict=True)}


def read(counts: list[Tensor]) -> list[int]:
    """Return 0-dim counts or flags as numbers: one wait per device."""
    if len({count.device for count in counts}) <= 1:
        return torch.stack(counts).tolist() if counts else []
    devices: dict[torch.device, list[int]] = {}
    for place, count in enumerate(counts):
        devices.setdefault(count.device, []).append(place)
    found = [0] * len(counts)
    for places in devices.values():
        values = torch.stack([counts[place] for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return found
