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
        return _dist.maxima(grads, found)
    # Powers of float32 norms do not overflow in float64.
    return _dist.sums(grads, found.double() ** order).pow(1.0 / order).float()


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, float32.

    On the host where they come from several devices: one record needs one place.
    """
    if len({grad.device for grad in grads}) > 1:
        return torch.cat([statistics(stat, [grad]).cpu() for grad in grads])
    return _statistics.statistics(stat, grads)


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
    table = _dist.sums(list(grads.values()), torch.stack(rows)).tolist()
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
