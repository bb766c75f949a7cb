"""Fixed samples of the elements of tensors, compared bit by bit, and the sizes of dense gradients."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradsurgeon.tensors import _numbers
from gradsurgeon.tensors._dist import Tensors

# Elements per tensor by which checks compare; smaller tensors are compared whole.
SAMPLE = 1024


@lru_cache(maxsize=256)
def _places(numel: int, most: int, device: torch.device) -> Tensor:
    # Random places: a stride would meet the same column of a matrix again and again.
    generator = torch.Generator().manual_seed(numel)
    places = torch.randint(numel, (most,), generator=generator)
    return places.to(device)


def sample(tensor: Tensor, most: int = SAMPLE) -> Tensor:
    """Return a copy of elements of a tensor, flat: all of a small one, else ``most`` elements at fixed places.

    The places depend on the number of elements alone, and some may occur twice.
    """
    tensor = tensor.detach()
    numel = tensor.numel()
    if numel <= most:
        return tensor.flatten().clone()
    places = _places(numel, most, tensor.device)
    return torch.take(tensor, places)


@lru_cache(maxsize=16)
def _signs(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(2, (count,), generator=generator)
    signs = bits * 2.0 - 1.0
    return signs.to(device)


def norms_and_sums(samples: Tensors) -> Tensor:
    """Return the norm of each sample, and a sum with fixed signs, on their device. Shape ``[n, 2]``, float32.

    Two samples of equal norm have different sums, unless they are equal or the difference happens to cancel.
    """
    flat_samples = []
    for real in samples:
        if real.is_complex():
            real = torch.view_as_real(real)  # noqa: PLW2901 # the same numbers
        flat_samples.append(real.flatten().float())
    rows = pad_sequence(flat_samples, batch_first=True)
    signs = _signs(rows.shape[1], rows.device)
    norms = torch.linalg.vector_norm(rows, dim=1)
    sums = (rows * signs).sum(1)
    return torch.stack([norms, sums], 1)


def differing(old: Tensors, new: Tensors) -> Tensor:
    """Return the share of elements that differ, per pair of flat tensors. Shape ``[n]``, float32, on their device."""
    shares = []
    for before, now in zip(old, new, strict=True):
        differs = _numbers.differs(before, now)
        shares.append(differs.float().mean())
    return torch.stack(shares)


def largest(grad: Tensor) -> Tensor:
    """Return the places of the largest magnitudes in a gradient of any layout. Shape ``[k]``, int64."""
    if grad.layout == torch.strided:
        flat = grad.detach().abs().flatten()
        count = min(SAMPLE, flat.numel())
        return flat.topk(count).indices
    # A sparse gradient gives its first stored rows.
    rows = grad.detach().coalesce().indices()[0]
    width = max(1, grad.numel() // max(1, grad.shape[0]))
    rows = rows[: max(1, SAMPLE // width)]
    columns = torch.arange(width, device=rows.device)
    places = rows.unsqueeze(1) * width + columns
    return places.flatten()


def by_device(indices: Iterable[int], tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Return the indices of tensors in groups, one group per device."""
    groups = defaultdict(list)
    for index in indices:
        groups[tensors[index].device].append(index)
    return list(groups.values())


def dense_grads(grads: Mapping[int, Tensor], indices: Sequence[int]) -> dict[int, Tensor]:
    """Return those gradients that are dense and have elements. A rank may hold no element of a gradient."""
    dense = {}
    for index in indices:
        grad = grads.get(index)
        if grad is not None and grad.layout == torch.strided and grad.numel():
            dense[index] = grad
    return dense


def sizes_of(grads: Mapping[int, Tensor], indices: Sequence[int]) -> tuple[float, ...]:
    """Return the norm and the largest element of all dense gradients."""
    dense = list(dense_grads(grads, indices).values())
    if not dense:
        return ()
    norm = torch.nn.utils.get_total_norm(dense)
    most = torch.nn.utils.get_total_norm(dense, math.inf)
    return float(norm), float(most)
