"""Counts of the elements of tensors by sign and magnitude: exact, and without a wait for the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradsurgeon.tensors import _dist, _numbers
from gradsurgeon.tensors._dist import Tensors
from gradsurgeon.tensors.statistics import (
    HISTOGRAM,
    HISTOGRAM_BINS,
    HISTOGRAM_LOWEST,
    HISTOGRAM_OCTAVES,
)

_COLUMNS = len(HISTOGRAM)
_ZEROS = 2 * HISTOGRAM_BINS
_NONFINITE = _ZEROS + 1
# Elements that are counted together, which takes some ten times their own memory.
_AT_ONCE = 2**22
_WIDE = (torch.float32, torch.float64)
# Elements of the tensor with this number.
_Piece = tuple[int, Tensor]


def histograms(tensors: Tensors) -> Tensor:
    """Count the elements of tensors on one device, or of this rank's parts of sharded ones. Shape ``[n, 66]``, float64."""
    parts = list(map(_dist.local, tensors))
    flats = [_numbers.values(part).reshape(-1) for part in parts]
    device = flats[0].device
    counts = torch.zeros(len(parts), _COLUMNS, dtype=torch.float64, device=device)
    one = torch.ones((), dtype=torch.float64, device=device)
    for pieces in _together(flats):
        wide = []
        for _, part in pieces:
            is_wide = part.dtype in _WIDE
            wide.append(part if is_wide else part.float())
        columns = _columns(torch.cat(wide))
        start = 0
        for number, elements in pieces:
            end = start + len(elements)
            columns[start:end] += number * _COLUMNS
            start = end
        counts.view(-1).scatter_add_(0, columns, one.expand(len(columns)))
    for number, part in enumerate(parts):
        # A sparse tensor leaves zeros out.
        missing = part.numel() - flats[number].numel()
        if missing:
            counts[number, _ZEROS] += missing
    return counts


def _together(flats: Tensors) -> Iterator[list[_Piece]]:
    """Yield the tensors in pieces that are counted together: many small ones, or a part of a large one."""
    waiting: list[_Piece] = []
    size = 0
    for number, flat in enumerate(flats):
        for elements in torch.split(flat, _AT_ONCE):
            if waiting and size + len(elements) > _AT_ONCE:
                yield waiting
                waiting = []
                size = 0
            waiting.append((number, elements))
            size += len(elements)
    if waiting:
        yield waiting


def _columns(elements: Tensor) -> Tensor:
    # A mantissa is at least 0.5, so the floor of log2 is one less than the exponent. `log2` itself would round.
    _, exponents = torch.frexp(elements)
    octaves = exponents.long() - (1 + HISTOGRAM_LOWEST)
    places = (octaves // HISTOGRAM_OCTAVES).clamp_(0, HISTOGRAM_BINS - 1)
    columns = torch.where(elements < 0, HISTOGRAM_BINS - 1 - places, HISTOGRAM_BINS + places)
    columns = columns.masked_fill_(elements == 0, _ZEROS)
    return columns.masked_fill_(elements.isfinite().logical_not_(), _NONFINITE)
