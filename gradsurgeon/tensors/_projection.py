"""Two projections of a tensor: signed sums of its elements, alike whatever its layout and however ranks share it.

The signs are bits of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), fixed for
each `PATTERN`. The squared difference of two projections is in the mean the squared norm of the difference.
"""

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
_COLUMNS, _ROWS, _ALL = 0, 1, 1 + PROJECTIONS  # the first number of each kind of pattern


@lru_cache(maxsize=16)
def _column_signs(device: torch.device) -> Tensor:
    return _signs(_COLUMNS, PERIOD, device)


def _signs(pattern: int, length: int, device: torch.device) -> Tensor:
    state = torch.arange(1, length + 1, dtype=torch.int64)
    state = state * -7046029254386353131 + (PATTERN * 1000 + pattern)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # Integers wrap around, and a shift to the right keeps the sign, which the mask takes off.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return torch.where(state < 0, -1.0, 1.0).to(device)


def _rows(length: int, device: torch.device) -> Tensor:
    # Powers of two: few tables serve tensors of all sizes.
    return _row_signs(1 << max(10, (length - 1).bit_length()), device)


@lru_cache(maxsize=16)
def _row_signs(length: int, device: torch.device) -> Tensor:
    return torch.stack([_signs(_ROWS + k, length, device).double() for k in range(PROJECTIONS)])


@lru_cache(maxsize=16)
def _all(device: torch.device) -> Tensor:
    return torch.stack([_signs(_ALL + k, _FULL, device).double() for k in range(PROJECTIONS)])


def projections(tensor: Tensor) -> Tensor:
    """Return the projections of a tensor, or of this rank's part of a sharded tensor. Shape ``[2]``, float64.

    A complex tensor has real and imaginary parts in turn. The parts of a sharded tensor add up to the whole.
    """
    part = _dist.local(tensor).detach().resolve_conj().resolve_neg()
    whole = tensor.numel() * (1 + part.is_complex())
    device = part.device
    if not part.numel():
        return torch.zeros(PROJECTIONS, dtype=torch.float64, device=device)
    if part.layout != torch.strided:
        part = part.to_dense()
    places = _dist.places(tensor)
    if part.is_complex():
        part = torch.view_as_real(part)
        places = [*places, torch.arange(2)] if places else []
    if not places:
        return _of_whole(part.reshape(-1))
    sizes = [*tensor.shape, *([2] if part.dim() > tensor.dim() else [])]
    return _of_block(part, places, sizes, whole)


def _of_whole(flat: Tensor) -> Tensor:
    if len(flat) < _FULL:
        return _all(flat.device)[:, : len(flat)] @ flat.double()
    signs = _column_signs(flat.device)
    even = len(flat) // PERIOD * PERIOD
    rows = _rows(-(-len(flat) // PERIOD), flat.device)
    sums = _row_sums(flat[:even].view(-1, PERIOD), signs)
    found = rows[:, : len(sums)] @ sums
    if rest := len(flat) - even:
        found += rows[:, len(sums)] * (flat[even:].double() @ signs[:rest].double())
    return found


def _row_sums(rows: Tensor, signs: Tensor) -> Tensor:
    if rows.dtype not in _numbers.HALF:
        return torch.mv(rows, signs.to(rows.dtype)).double()
    parts = torch.split(rows, _AT_ONCE) if rows.is_cpu else (rows,)
    return torch.cat([torch.mv(part.float(), signs) for part in parts]).double()


def _of_block(part: Tensor, places: list[Tensor], sizes: list[int], whole: int) -> Tensor:
    found = torch.zeros(PROJECTIONS, dtype=torch.float64, device=part.device)
    most = max(1, _INDICES // max(1, part.numel() // len(part)))
    for piece, first in zip(torch.split(part, most), torch.split(places[0], most), strict=True):
        index = torch.zeros((), dtype=torch.int64)
        for size, of_dim in zip(sizes, (first, *places[1:]), strict=True):
            index = index.unsqueeze(-1) * size + of_dim
        found += _of_indices(piece.reshape(-1), index.reshape(-1).to(part.device), whole)
    return found


def _of_indices(flat: Tensor, index: Tensor, whole: int) -> Tensor:
    """Return the projections of elements at any indices of a tensor with so many elements in all."""
    if whole < _FULL:
        signs = _all(flat.device)[:, index]
    else:
        rows = _rows(-(-whole // PERIOD), flat.device)
        signs = rows[:, index // PERIOD] * _column_signs(flat.device)[index % PERIOD]
    return signs @ flat.double()
