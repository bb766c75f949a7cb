"""The inner products of the gradients of several losses: how long each is, and how far two agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsurgeon import _numbers

# Elements of a gradient that are copied at once: thousands of small ones take one call, and what is copied of the
# largest layer stays in the cache of a processor. On a device it is calls that cost.
_CHUNK, _CHUNK_ON_DEVICE = 2**16, 2**20

Rows = Sequence[Sequence[Tensor | None]]


class InnerProducts(NamedTuple):
    """What is known of the gradients of n losses over some parameters.

    Attributes:
        products: float64 of shape ``[n, n]``, on the host.
        opposed: of each pair, the sum of the squares of those elements of both at which the two have opposite
            signs, of the same kind; ``None`` where nobody has asked.
    """

    products: Tensor
    opposed: Tensor | None = None

    def unscaled(self, scale: Tensor) -> InnerProducts:
        """Return them in true units, of gradients that a scaler has multiplied. Waits for the device."""
        square = float(scale) ** 2
        opposed = None if self.opposed is None else self.opposed / square
        return InnerProducts(self.products / square, opposed)


def inner_products(
    rows: Rows,
    like: Sequence[Tensor],
    average: Callable[[Tensor], Tensor] | None = None,
    *,
    compare: bool = False,
) -> InnerProducts:
    """Return the inner products of gradients over parameters. Waits once for each device.

    Args:
        rows: per loss the gradients of the parameters, ``None`` for zeros.
        like: the parameters.
        average: maps some elements of all losses, ``[n, elements]``, to their average over ranks.
        compare: whether to compare the signs, too.
    """
    n = len(rows)
    sums: dict[torch.device, Tensor] = {}
    # To average few large pieces takes less time than many small ones.
    chunk = _CHUNK if average is None else _CHUNK_ON_DEVICE
    for block in _blocks(rows, like, chunk):
        block = (block if average is None else average(block)).double()  # noqa: PLW2901 # as precise
        both = torch.zeros(2, n, n, dtype=torch.float64, device=block.device)
        both[0] = block @ block.T
        if compare:
            squares = block.square()
            above, below = (block > 0).double(), (block < 0).double()
            # The squares of one where it is above and the other below 0, or the other way round.
            against = (squares * above) @ below.T + (squares * below) @ above.T
            both[1] = against + against.T
        sums[block.device] = sums[block.device] + both if block.device in sums else both
    total = torch.zeros(2, n, n, dtype=torch.float64, device="cpu")
    for one in sums.values():
        total += one.cpu()
    return InnerProducts(total[0], total[1] if compare else None)


def _blocks(rows: Rows, like: Sequence[Tensor], on_host: int) -> Iterator[Tensor]:
    """Yield the elements of all gradients, ``[n, elements]``, in pieces of one device and dtype."""
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    held: dict[tuple[torch.device, torch.dtype], int] = {}
    for place, tensor in enumerate(like):
        kind, size = (tensor.device, tensor.dtype), tensor.numel()
        chunk = on_host if tensor.is_cpu else _CHUNK_ON_DEVICE
        if size > chunk:
            flat = [torch.split(_flat(row[place], tensor), chunk) for row in rows]
            yield from map(torch.stack, zip(*flat, strict=True))
            continue
        if held.get(kind, 0) + size > chunk:
            yield _block(rows, like, small.pop(kind))
            held[kind] = 0
        small.setdefault(kind, []).append(place)
        held[kind] = held.get(kind, 0) + size
    for places in small.values():
        yield _block(rows, like, places)


def _block(rows: Rows, like: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    return torch.stack([torch.cat([_flat(row[p], like[p]) for p in places]) for row in rows])


def _flat(row: Tensor | None, like: Tensor) -> Tensor:
    if row is None:
        row = torch.zeros_like(like)
    if row.is_complex():
        # The product of two complex gradients is that of their real and imaginary parts.
        row = torch.view_as_real(row.resolve_conj())
    return _numbers.in_float32(row.reshape(-1))


def pairs(
    names: Sequence[str], known: InnerProducts
) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Yield the name of each pair, and cosine, ratio of norms and opposed share; NaN where a gradient is zero."""
    products = known.products.tolist()
    opposed = [] if known.opposed is None else known.opposed.tolist()
    for first, second in itertools.combinations(range(len(names)), 2):
        one, other = products[first][first], products[second][second]
        pair = f"{names[first]}/{names[second]}"
        if not (one > 0 and other > 0 and math.isfinite(one + other)):
            yield pair, (math.nan, math.nan, math.nan)
            continue
        cosine = products[first][second] / math.sqrt(one * other)
        share = math.sqrt(opposed[first][second] / (one + other))
        yield pair, (max(-1.0, min(1.0, cosine)), math.sqrt(one / other), share)


def weighted_sum(terms: Mapping[str, Tensor | None], weights: Mapping[str, float]) -> Tensor | None:
    """Return a new tensor of the dtype of the terms, ``None`` if there is none. Half precision is rounded once, at the end.

    Args:
        terms: gradients by the names of their losses, ``None`` for zeros.
        weights: those that are not 1, by the same names.
    """
    total: Tensor | None = None
    there = {name: term for name, term in terms.items() if term is not None}
    for name, term in there.items():
        wide, weight = _numbers.in_float32(term), weights.get(name, 1.0)
        total = wide * weight if total is None else total.add_(wide, alpha=weight)
    return total if total is None else total.to(next(iter(there.values())).dtype)
