"""Two projections of a tensor: signed sums of its elements, alike whatever its layout and however ranks share it.

The signs are bits of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), fixed for
each `PATTERN`. The squared difference of two projections is in the mean the squared norm of the difference.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gradsurgeon.tensors import _dist, _numbers

PATTERN = 1  # the version; other signs get another number
PROJECTIONS = 2
# Elements per row. A prime, so that no dimension of a tensor has it as a divisor.
PERIOD = 4093
# A pattern of rows times columns is blind to some exchanges of rows, and few rows show it. Smaller tensors get two
# patterns in which each element has a sign of its own.
_FULL = 64 * PERIOD
_AT_ONCE = 64  # rows of a half-precision tensor that are converted together
_INDICES = 2**20  # elements whose indices are computed together
# The first number of each kind of pattern.
_COLUMNS = 0
_ROWS = 1
_ALL = 1 + PROJECTIONS
# The shifts and factors of SplitMix64.
_MIXES = ((30, -4658895280553007687), (27, -7723592293110705685))


@lru_cache(maxsize=16)
def _column_signs(device: torch.device) -> Tensor:
    return _signs(_COLUMNS, PERIOD, device)


def _signs(pattern: int, length: int, device: torch.device) -> Tensor:
    state = torch.arange(1, length + 1, dtype=torch.int64)
    state = state * -7046029254386353131 + (PATTERN * 1000 + pattern)
    for shift, factor in _MIXES:
        # Integers wrap around, and a shift to the right keeps the sign, which the mask removes.
        mask = (1 << (64 - shift)) - 1
        shifted = (state >> shift) & mask
        state = (state ^ shifted) * factor
    return torch.where(state < 0, -1.0, 1.0).to(device)


def _row_count(length: int) -> int:
    return (length + PERIOD - 1) // PERIOD


def _rows(length: int, device: torch.device) -> Tensor:
    # Powers of two: few tables serve tensors of all sizes.
    bits = max(10, (length - 1).bit_length())
    return _sign_table(_ROWS, 1 << bits, device)


def _element_signs(device: torch.device) -> Tensor:
    return _sign_table(_ALL, _FULL, device)


@lru_cache(maxsize=32)
def _sign_table(first_pattern: int, length: int, device: torch.device) -> Tensor:
    """Return a row of signs for each projection. Shape ``[2, length]``, float64."""
    patterns = range(first_pattern, first_pattern + PROJECTIONS)
    return torch.stack([_signs(pattern, length, device).double() for pattern in patterns])


def projections_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the `projections` of each tensor. Shape ``[n, 2]``, float64."""
    return torch.stack([projections(tensor) for tensor in tensors])


def projections(tensor: Tensor) -> Tensor:
    """Return the projections of a tensor, or of this rank's part of a sharded tensor. Shape ``[2]``, float64.

    A complex tensor has real and imaginary parts in turn. The parts of a sharded tensor add up to the whole.
    """
    part = _dist.local(tensor).detach().resolve_conj().resolve_neg()
    if not part.numel():
        return torch.zeros(PROJECTIONS, dtype=torch.float64, device=part.device)
    if part.layout != torch.strided:
        part = part.to_dense()
    places = _dist.places(tensor)
    sizes = list(tensor.shape)
    is_whole = not places
    if part.is_complex():
        part = torch.view_as_real(part)
        places.append(torch.arange(2))
        sizes.append(2)
    if is_whole:
        return _of_whole(part.reshape(-1))
    return _of_block(part, places, sizes)


def _of_whole(flat: Tensor) -> Tensor:
    length = len(flat)
    if length < _FULL:
        return _element_signs(flat.device)[:, :length] @ flat.double()
    signs = _column_signs(flat.device)
    even = length // PERIOD * PERIOD
    rows = _rows(_row_count(length), flat.device)
    sums = _row_sums(flat[:even].view(-1, PERIOD), signs)
    projections = rows[:, : len(sums)] @ sums
    rest = flat[even:].double()
    if len(rest):
        projections += rows[:, len(sums)] * (rest @ signs[: len(rest)].double())
    return projections


def _row_sums(rows: Tensor, signs: Tensor) -> Tensor:
    if rows.dtype not in _numbers.HALF:
        return torch.mv(rows, signs.to(rows.dtype)).double()
    parts: Sequence[Tensor] = (rows,)
    if rows.is_cpu:
        parts = torch.split(rows, _AT_ONCE)
    return torch.cat([torch.mv(part.float(), signs) for part in parts]).double()


def _of_block(part: Tensor, places: list[Tensor], sizes: list[int]) -> Tensor:
    """Return the projections of a part of a tensor with these sizes, given the places of the part by dimension."""
    projections = torch.zeros(PROJECTIONS, dtype=torch.float64, device=part.device)
    whole = math.prod(sizes)
    width = max(1, part.numel() // len(part))
    height = max(1, _INDICES // width)
    first_places, *other_places = places
    pieces = torch.split(part, height)
    for piece, rows in zip(pieces, torch.split(first_places, height), strict=True):
        index = torch.zeros((), dtype=torch.int64)
        for size, of_dim in zip(sizes, (rows, *other_places), strict=True):
            index = index.unsqueeze(-1) * size + of_dim
        index = index.reshape(-1).to(part.device)
        projections += _of_indices(piece.reshape(-1), index, whole)
    return projections


def _of_indices(flat: Tensor, index: Tensor, whole: int) -> Tensor:
    """Return the projections of elements at these indices of a tensor, given its number of elements."""
    device = flat.device
    if whole < _FULL:
        signs = _element_signs(device)[:, index]
    else:
        rows = _rows(_row_count(whole), device)
        signs = rows[:, index // PERIOD] * _column_signs(device)[index % PERIOD]
    return signs @ flat.double()
