"""Fixed samples of the elements of tensors, compared bit by bit."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradsurgeon.tensors import _numbers

# Elements per tensor by which checks compare; smaller tensors are compared whole.
SAMPLE = 1024


@lru_cache(maxsize=256)
def _places(numel: int, most: int, device: torch.device) -> Tensor:
    # Drawn: a stride would meet the same column of a matrix again and again.
    generator = torch.Generator().manual_seed(numel)
    return torch.randint(numel, (most,), generator=generator).to(device)


def sample(tensor: Tensor, most: int = SAMPLE) -> Tensor:
    """Return a copy of elements of a tensor, flat: all of a small one, else ``most`` elements at fixed places.

    The places depend on the number of elements alone, and some may occur twice.
    """
    tensor = tensor.detach()
    if tensor.numel() <= most:
        return tensor.flatten().clone()
    return torch.take(tensor, _places(tensor.numel(), most, tensor.device))


@lru_cache(maxsize=16)
def _signs(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randint(2, (count,), generator=generator) * 2.0 - 1.0).to(device)


def norms_and_sums(samples: Sequence[Tensor]) -> Tensor:
    """Return the norm of each sample, and a sum with fixed signs, on their device. Shape ``[n, 2]``, float32.

    Two samples of equal norm have different sums, unless they are equal or the difference happens to cancel.
    """
    reals = [torch.view_as_real(one) if one.is_complex() else one for one in samples]
    rows = pad_sequence([real.flatten().float() for real in reals], batch_first=True)
    sums = (rows * _signs(rows.shape[1], rows.device)).sum(1)
    return torch.stack([torch.linalg.vector_norm(rows, dim=1), sums], 1)


def differing(old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """Return the share of elements that differ, per pair of flat tensors. Shape ``[n]``, float32, on their device."""
    pairs = zip(old, new, strict=True)
    return torch.stack([_numbers.differs(*pair).float().mean() for pair in pairs])


def largest(grad: Tensor) -> Tensor:
    """Return the places of the largest magnitudes in a gradient of any layout. Shape ``[k]``, int64."""
    if grad.layout != torch.strided:
        whole = grad.detach().coalesce()
        rows = whole.indices()[0]
        width = max(1, grad.numel() // max(1, grad.shape[0]))
        rows = rows[: max(1, SAMPLE // width)]
        return (rows.unsqueeze(1) * width + torch.arange(width, device=rows.device)).flatten()
    flat = grad.detach().abs().flatten()
    return flat.topk(min(SAMPLE, flat.numel())).indices


def by_device(indices: Iterable[int], of: Mapping[int, Tensor]) -> list[list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for index in indices:
        groups.setdefault(of[index].device, []).append(index)
    return list(groups.values())
