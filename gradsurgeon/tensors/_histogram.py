"""Counts of the elements of a tensor by sign and magnitude: exact, in one pass, and without a wait for the device.

The exponent of a floating-point number is floor(log2) of its magnitude. So sign and exponent are read off the bits, counted, and
only then gathered into bins.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gradsurgeon.tensors import _dist, _numbers, _torch
from gradsurgeon.tensors.statistics import (
    HISTOGRAM,
    HISTOGRAM_BINS,
    HISTOGRAM_LOWEST,
    HISTOGRAM_OCTAVES,
)

_ZEROS = 2 * HISTOGRAM_BINS
_NONFINITE = _ZEROS + 1
# Elements that are counted together: their codes take a few times their own memory.
_AT_ONCE = 2**22
# On a device so many elements in turn add to counts of their own, as few counts get nearly all elements.
_SPREAD = 64
# By dtype: the integers of its size, its bits of mantissa and of exponent.
_FORMATS = {torch.float32: (torch.int32, 23, 8), torch.float64: (torch.int64, 52, 11)}


def histogram(tensor: Tensor, _missing: int = 0) -> Tensor:
    """Count the elements of a tensor, or of this rank's part of a sharded one. Shape ``[66]``, float64."""
    part = _dist.local(tensor).detach()
    flat = _numbers.values(part).resolve_neg().reshape(-1)
    counts = torch.zeros(len(HISTOGRAM), dtype=torch.float64, device=flat.device)
    # Of a sparse tensor, the elements that it leaves out.
    counts[_ZEROS] += part.numel() - flat.numel()
    for elements in torch.split(flat, _AT_ONCE):
        counts += _counts(elements)
    return counts


def _counts(elements: Tensor) -> Tensor:
    if elements.dtype not in _FORMATS:
        return _counts(elements.float())
    integers, mantissa, exponent = _FORMATS[elements.dtype]
    zero = 2 << exponent
    codes = (elements.view(integers) >> mantissa) & (zero - 1)
    codes = codes.masked_fill_(elements == 0, zero)
    by_code = _count(codes, zero + 1).double()
    counts = by_code.new_zeros(len(HISTOGRAM))
    return counts.index_add_(0, _columns(elements.dtype, elements.device), by_code)


def _count(codes: Tensor, number: int) -> Tensor:
    if _torch.is_host(codes):
        return torch.bincount(codes, minlength=number)
    # `bincount` would wait for the largest code.
    places = torch.arange(len(codes), device=codes.device) % _SPREAD
    counts = torch.zeros(_SPREAD * number, dtype=torch.int64, device=codes.device)
    ones = torch.ones((), dtype=torch.int64, device=codes.device).expand(len(codes))
    counts.scatter_add_(0, places * number + codes, ones)
    return counts.view(_SPREAD, number).sum(0)


@lru_cache(maxsize=16)
def _columns(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the column of each code: sign and exponent as one number, then a code for zero."""
    _, _, exponent_bits = _FORMATS[dtype]
    largest = (1 << exponent_bits) - 1
    bias = largest // 2
    columns = []
    for is_negative in (False, True):
        for exponent in range(largest):
            place = (exponent - bias - HISTOGRAM_LOWEST) // HISTOGRAM_OCTAVES
            place = min(max(place, 0), HISTOGRAM_BINS - 1)
            if is_negative:
                columns.append(HISTOGRAM_BINS - 1 - place)
            else:
                columns.append(HISTOGRAM_BINS + place)
        columns.append(_NONFINITE)
    columns.append(_ZEROS)
    return torch.tensor(columns, device=device)
