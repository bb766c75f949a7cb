"""The gradients of several losses and their inner products: the norm of each, and the agreement of each pair."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradsurgeon.tensors import _numbers

# The number of gradient elements copied at once. On the host, thousands of small gradients take one call, and the copy
# of a large gradient stays in the processor cache. On a device only the calls cost time.
_CHUNK = 2**16
_CHUNK_ON_DEVICE = 2**20

_Rows = Sequence[Sequence[Tensor | None]]


class Contributions:
    """The gradients that several senders, losses or modules, contribute to some tensors.

    ``grads`` has them by tensor id and then by sender; a missing sender counts as zeros.
    """

    def __init__(
        self, grads: Mapping[int, Mapping[str, Tensor]], scale: Tensor | None = None
    ) -> None:
        self._grads = grads
        self._scale = scale
        self._known: dict[tuple[tuple[object, ...], ...], Tensor] = {}

    def products(
        self,
        senders: Sequence[str],
        tensors: Sequence[Tensor],
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the inner products of n gradients in true units, float64 of shape ``[n, n]`` on the host. Waits.

        All rules with the same question share the answer. ``average`` maps some elements of all senders, ``[n, elements]``,
        to their average over ranks.
        """
        key = (*senders,), (*map(id, tensors),)
        if key not in self._known:
            columns = [self._grads.get(key, {}) for key in key[1]]
            rows = [[column.get(sender) for column in columns] for sender in senders]
            self._known[key] = _inner_products(rows, tensors, average)
            if self._scale is not None:
                self._known[key] /= float(self._scale) ** 2
        return self._known[key]


def _inner_products(
    rows: _Rows, like: Sequence[Tensor], average: Callable[[Tensor], Tensor] | None
) -> Tensor:
    sums: dict[torch.device, Tensor] = {}
    # Averaging few large pieces takes less time than averaging many small ones.
    chunk = _CHUNK if average is None else _CHUNK_ON_DEVICE
    for block in _blocks(rows, like, chunk):
        block = (block if average is None else average(block)).double()  # noqa: PLW2901 # as precise
        found = block @ block.T
        sums[block.device] = sums[block.device] + found if block.device in sums else found
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu")
    for one in sums.values():
        total += one.cpu()
    return total


def _blocks(rows: _Rows, like: Sequence[Tensor], on_host: int) -> Iterator[Tensor]:
    """Yield the elements of all gradients, ``[n, elements]``, in pieces of one device and dtype."""
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    held: dict[tuple[torch.device, torch.dtype], int] = {}
    for place, tensor in enumerate(like):
        kind = (tensor.device, tensor.dtype)
        size = tensor.numel()
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


def _block(rows: _Rows, like: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    return torch.stack([torch.cat([_flat(row[p], like[p]) for p in places]) for row in rows])


def _flat(row: Tensor | None, like: Tensor) -> Tensor:
    if row is None:
        row = torch.zeros_like(like)
    if row.is_complex():
        # The inner product of two complex gradients is the inner product of their real and imaginary parts.
        row = torch.view_as_real(row.resolve_conj())
    return _numbers.in_float32(row.reshape(-1))


def pairs(senders: Sequence[str], known: Tensor) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the name of each pair with cosine and ratio of norms, given the inner products; NaN if a gradient is zero."""
    products = known.tolist()
    for first, second in itertools.combinations(range(len(senders)), 2):
        one = products[first][first]
        other = products[second][second]
        numbers = (math.nan, math.nan)
        if one > 0 and other > 0 and math.isfinite(one + other):
            cosine = products[first][second] / math.sqrt(one * other)
            numbers = (max(-1.0, min(1.0, cosine)), math.sqrt(one / other))
        yield f"{senders[first]}/{senders[second]}", numbers


def weighted_sum(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Return the sum of gradients by sender, in the dtype of the terms; a sender without a weight has 1.

    The sum is taken in float32 or more, so half precision is rounded once, at the end.
    """
    (first, one), *others = terms.items()
    total = _numbers.in_float32(one) * weights.get(first, 1.0)
    for name, term in others:
        total.add_(_numbers.in_float32(term), alpha=weights.get(name, 1.0))
    return total.to(one.dtype)
