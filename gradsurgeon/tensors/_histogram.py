"""Counts of the elements of a tensor by sign and magnitude: exact, and without a wait for the device."""

import torch
from torch import Tensor

from gradsurgeon.tensors import _dist, _numbers
from gradsurgeon.tensors.statistics import (
    HISTOGRAM,
    HISTOGRAM_BINS,
    HISTOGRAM_LOWEST,
    HISTOGRAM_OCTAVES,
)

_ZEROS = 2 * HISTOGRAM_BINS
_NONFINITE = _ZEROS + 1
# Elements that are counted together, which takes some ten times their own memory.
_AT_ONCE = 2**22
_WIDE = (torch.float32, torch.float64)


def histogram(tensor: Tensor, _missing: int = 0) -> Tensor:
    """Count the elements of a tensor, or of this rank's part of a sharded one. Shape ``[66]``, float64."""
    part = _dist.local(tensor)
    flat = _numbers.values(part).reshape(-1)
    counts = torch.zeros(len(HISTOGRAM), dtype=torch.float64, device=flat.device)
    # A sparse tensor leaves zeros out.
    counts[_ZEROS] += part.numel() - flat.numel()
    one = torch.ones((), dtype=torch.float64, device=flat.device)
    for elements in torch.split(flat, _AT_ONCE):
        counts.scatter_add_(0, _columns(elements), one.expand(len(elements)))
    return counts


def _columns(elements: Tensor) -> Tensor:
    if elements.dtype not in _WIDE:
        return _columns(elements.float())
    # A mantissa is at least 0.5, so the floor of log2 is one less than the exponent. `log2` itself would round.
    _, exponents = torch.frexp(elements)
    octaves = exponents.long() - (1 + HISTOGRAM_LOWEST)
    places = (octaves // HISTOGRAM_OCTAVES).clamp_(0, HISTOGRAM_BINS - 1)
    columns = torch.where(elements < 0, HISTOGRAM_BINS - 1 - places, HISTOGRAM_BINS + places)
    columns = columns.masked_fill_(elements == 0, _ZEROS)
    return columns.masked_fill_(elements.isfinite().logical_not_(), _NONFINITE)
