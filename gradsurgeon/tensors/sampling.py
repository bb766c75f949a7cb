"""Fixed samples of the elements of tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def _places(numel: int, most: int, device: torch.device) -> Tensor:
    # Drawn: a stride would meet the same column of a matrix again and again.
    generator = torch.Generator().manual_seed(numel)
    return torch.randint(numel, (most,), generator=generator).to(device)


def sample(tensor: Tensor, most: int) -> Tensor:
    """Return a copy of elements of a tensor, flat: all of a small one, else ``most`` elements at fixed places.

    The places depend on the number of elements alone, and some may occur twice.
    """
    tensor = tensor.detach()
    if tensor.numel() <= most:
        return tensor.flatten().clone()
    return torch.take(tensor, _places(tensor.numel(), most, tensor.device))
