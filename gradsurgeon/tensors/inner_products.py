"""The gradients of several losses and their inner products: the norm of each, and the agreement of each pair."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradsurgeon.tensors import _numbers
from gradsurgeon.tensors._dist import Tensors

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
        tensors: Tensors,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the inner products of n gradients in true units, float64 of shape ``[n, n]`` on the host. Waits.

        All rules with the same question share the answer. ``average`` maps some elements of all senders, ``[n, elements]``,
        to their average over ranks.
        """
        ids = tuple(map(id, tensors))
        key = (tuple(senders), ids)
        if key in self._known:
            return self._known[key]
        rows = []
        for sender in senders:
            by_sender = [self._grads.get(tensor_id, {}) for tensor_id in ids]
            rows.append([grads.get(sender) for grads in by_sender])
        products = _inner_products(rows, tensors, average)
        if self._scale is not None:
            products /= float(self._scale) ** 2
        self._known[key] = products
        return products


def _inner_products(
    rows: _Rows, like: Tensors, average: Callable[[Tensor], Tensor] | None
) -> Tensor:
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu")
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
        device = exact.device
        sums[device] = sums.get(device, 0) + exact @ exact.T
    for products in sums.values():
        total += products.cpu()
    return total


def _blocks(rows: _Rows, like: Tensors, on_host: int) -> Iterator[Tensor]:
    """Yield the elements of all gradients, ``[n, elements]``, in pieces of one device and dtype."""
    small = defaultdict[object, list[int]](list)
    held = Counter[object]()
    for place, tensor in enumerate(like):
        kind = (tensor.device, tensor.dtype)
        size = tensor.numel()
        chunk = _CHUNK_ON_DEVICE
        if tensor.is_cpu:
            chunk = on_host
        if size > chunk:
            pieces = [torch.split(_flat(row[place], tensor), chunk) for row in rows]
            for of_all_rows in zip(*pieces, strict=True):
                yield torch.stack(of_all_rows)
            continue
        if held[kind] + size > chunk:
            yield _block(rows, like, small.pop(kind))
            held[kind] = 0
        small[kind].append(place)
        held[kind] += size
    for places in small.values():
        yield _block(rows, like, places)


def _block(rows: _Rows, like: Tensors, places: Sequence[int]) -> Tensor:
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
    norms = known.diagonal().sqrt()
    norms = norms.where(norms.isfinite() & (norms > 0), math.nan)
    # Rounding may exceed 1.
    cosines = (known / norms / norms[:, None]).clamp(-1, 1).tolist()
    ratios = (norms[:, None] / norms).tolist()
    for first, second in itertools.combinations(range(len(senders)), 2):
        pair = f"{senders[first]}/{senders[second]}"
        yield pair, (cosines[first][second], ratios[first][second])


def weighted_sum(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Return the sum of gradients by sender, in the dtype of the terms; a sender without a weight has 1.

    The sum is taken in float32 or more, so half precision is rounded once, at the end.
    """
    (first, first_term), *others = terms.items()
    total = _numbers.in_float32(first_term) * weights.get(first, 1.0)
    for sender, term in others:
        total.add_(_numbers.in_float32(term), alpha=weights.get(sender, 1.0))
    return total.to(first_term.dtype)
