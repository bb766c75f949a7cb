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
        # By senders and tensor ids.
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...]], Tensor] = {}

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
        ids = tuple([id(tensor) for tensor in tensors])
        key = (tuple(senders), ids)
        if key in self._known:
            return self._known[key]
        rows = [self._grads_of(sender, ids) for sender in senders]
        products = _inner_products(rows, tensors, average)
        if self._scale is not None:
            products /= float(self._scale) ** 2
        self._known[key] = products
        return products

    def _grads_of(self, sender: str, tensor_ids: Sequence[int]) -> list[Tensor | None]:
        grads = []
        for tensor_id in tensor_ids:
            by_sender = self._grads.get(tensor_id, {})
            grads.append(by_sender.get(sender))
        return grads


def _inner_products(
    rows: _Rows, like: Sequence[Tensor], average: Callable[[Tensor], Tensor] | None
) -> Tensor:
    sums: dict[torch.device, Tensor] = {}
    chunk = _CHUNK
    if average is not None:
        # Averaging few large pieces takes less time than averaging many small ones.
        chunk = _CHUNK_ON_DEVICE
    for block in _blocks(rows, like, chunk):
        averaged = block
        if average is not None:
            averaged = average(block)
        exact = averaged.double()
        products = exact @ exact.T
        device = exact.device
        if device in sums:
            products = sums[device] + products
        sums[device] = products
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu")
    for products in sums.values():
        total += products.cpu()
    return total


def _blocks(rows: _Rows, like: Sequence[Tensor], on_host: int) -> Iterator[Tensor]:
    """Yield the elements of all gradients, ``[n, elements]``, in pieces of one device and dtype."""
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    held: dict[tuple[torch.device, torch.dtype], int] = {}
    for place, tensor in enumerate(like):
        kind = (tensor.device, tensor.dtype)
        size = tensor.numel()
        chunk = _CHUNK_ON_DEVICE
        if tensor.is_cpu:
            chunk = on_host
        if size > chunk:
            pieces = [torch.split(_flat(row[place], tensor), chunk) for row in rows]
            for alike in zip(*pieces, strict=True):
                yield torch.stack(alike)
            continue
        if held.get(kind, 0) + size > chunk:
            yield _block(rows, like, small.pop(kind))
            held[kind] = 0
        small.setdefault(kind, []).append(place)
        held[kind] = held.get(kind, 0) + size
    for places in small.values():
        yield _block(rows, like, places)


def _block(rows: _Rows, like: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    joined = []
    for row in rows:
        flat = [_flat(row[place], like[place]) for place in places]
        joined.append(torch.cat(flat))
    return torch.stack(joined)


def _flat(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        grad = torch.zeros_like(like)
    if grad.is_complex():
        # The inner product of two complex gradients is the inner product of their real and imaginary parts.
        grad = torch.view_as_real(grad.resolve_conj())
    return _numbers.in_float32(grad.reshape(-1))


def pairs(senders: Sequence[str], known: Tensor) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the name of each pair with cosine and ratio of norms, given the inner products; NaN if a gradient is zero."""
    products = known.tolist()
    for first, second in itertools.combinations(range(len(senders)), 2):
        first_square = products[first][first]
        second_square = products[second][second]
        cosine = math.nan
        ratio = math.nan
        are_nonzero = first_square > 0 and second_square > 0
        if are_nonzero and math.isfinite(first_square + second_square):
            cosine = products[first][second] / math.sqrt(first_square * second_square)
            # Rounding may exceed 1.
            cosine = max(-1.0, min(1.0, cosine))
            ratio = math.sqrt(first_square / second_square)
        yield f"{senders[first]}/{senders[second]}", (cosine, ratio)


def weighted_sum(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Return the sum of gradients by sender, in the dtype of the terms; a sender without a weight has 1.

    The sum is taken in float32 or more, so half precision is rounded once, at the end.
    """
    (first, first_term), *others = terms.items()
    total = _numbers.in_float32(first_term) * weights.get(first, 1.0)
    for sender, term in others:
        total.add_(_numbers.in_float32(term), alpha=weights.get(sender, 1.0))
    return total.to(first_term.dtype)
