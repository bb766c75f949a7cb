"""Two projections of a tensor: signed sums of its elements, alike whatever its layout and however ranks share it.

The signs are bits of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), fixed for
each `PATTERN`. The squared difference of two projections is in the mean the squared norm of the difference.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

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
# Up to this many elements, copying a tensor to where others are summed with it costs less than a sum of its own.
_FEW = 2**14
# Rows of a half-precision tensor that are converted together, and stay in the cache of a host.
_ROWS_AT_ONCE = 256
_INDICES = 2**20  # elements whose indices are computed together
# The devices whose `torch.mm` reads half precision as it is, and sums in float32.
WIDENING = {"cuda"}
# The shifts and factors of SplitMix64.
_MIXES = ((30, -4658895280553007687), (27, -7723592293110705685))


def _signs(pattern: int, length: int, device: torch.device) -> Tensor:
    # On the device itself: a copy from the host would wait.
    state = torch.arange(1, length + 1, dtype=torch.int64, device=device)
    state = state * -7046029254386353131 + (PATTERN * 1000 + pattern)
    for shift, factor in _MIXES:
        # Integers wrap around, and a shift to the right keeps the sign, which the mask removes.
        mask = (1 << (64 - shift)) - 1
        shifted = (state >> shift) & mask
        state = (state ^ shifted) * factor
    return torch.where(state < 0, -1.0, 1.0)


# Returns a row of signs for each pattern, ``[patterns, length]``.
_Table = Callable[[torch.device, torch.dtype], Tensor]


@lru_cache(maxsize=64)
def _sign_table(
    patterns: tuple[int, ...], length: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    return torch.stack([_signs(pattern, length, device) for pattern in patterns]).to(dtype)


_column_signs: _Table = partial(_sign_table, (0,), PERIOD)
# Each element has a sign of its own.
_element_signs: _Table = partial(_sign_table, (3, 4), _FULL)


def _row_signs(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Powers of two: few tables serve tensors of all sizes.
    bits = max(10, (length - 1).bit_length())
    return _sign_table((1, 2), 1 << bits, device, dtype)


def _summed_in(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 costs little on the host, and much on a device."""
    if tensor.is_cpu or tensor.dtype == torch.float64:
        return torch.float64
    return torch.float32


def projections_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the `projections` of each tensor of one device. Shape ``[n, 2]``, float64 on the host, else float32."""
    if len(tensors) == 1:
        return projections(tensors[0])[None]
    by_position = {}
    # Tensors of nearly one size and one dtype, by position.
    joined: dict[tuple[int, torch.dtype], dict[int, Tensor]] = {}
    for position, tensor in enumerate(tensors):
        if _dist.is_sharded(tensor):
            by_position[position] = _of_shard(tensor)
            continue
        flat = _part(tensor).reshape(-1)
        if len(flat) > _FEW:
            by_position[position] = _of_flat(flat)
        else:
            width = 1 << (len(flat) - 1).bit_length()
            joined.setdefault((width, flat.dtype), {})[position] = flat
    for (width, _), flats in joined.items():
        # Rows, filled up with zeros.
        zeros = next(iter(flats.values())).new_zeros(width)
        parts = []
        for flat in flats.values():
            parts += [flat, zeros[len(flat) :]]
        sums = _of_elements(torch.cat(parts).view(-1, width))
        by_position.update(zip(flats, sums, strict=True))
    dtype = _summed_in(tensors[0])
    return torch.stack([by_position[position].to(dtype) for position in range(len(tensors))])


def projections(tensor: Tensor) -> Tensor:
    """Return the projections of a tensor, or of this rank's part of a sharded tensor. Shape ``[2]``.

    A complex tensor has real and imaginary parts in turn. The parts of a sharded tensor add up to the whole.
    They are float64 on the host, of a float64 tensor, and of a shard, else float32.
    """
    if _dist.is_sharded(tensor):
        return _of_shard(tensor)
    return _of_flat(_part(tensor).reshape(-1))


def _of_flat(flat: Tensor) -> Tensor:
    if len(flat) < _FULL:
        return _of_elements(flat[None])[0]
    return _of_long(flat)


def _part(tensor: Tensor) -> Tensor:
    part = _dist.local(tensor).detach().resolve_conj().resolve_neg()
    if part.layout != torch.strided:
        part = part.to_dense()
    if part.is_complex():
        part = torch.view_as_real(part)
    return part


def _of_elements(rows: Tensor) -> Tensor:
    """Return the projections of each row, whose elements have a sign each. Shape ``[n, 2]``."""
    dtype = _summed_in(rows)
    if dtype == torch.float64:
        signs = _element_signs(rows.device, dtype)[:, : rows.shape[1]]
        return rows.to(dtype) @ signs.t()
    sums = rows.new_empty(PROJECTIONS, len(rows), dtype=dtype)
    _sum_rows(rows, _element_signs, sums)
    return sums.t()


def _of_long(flat: Tensor) -> Tensor:
    row_count = math.ceil(len(flat) / PERIOD)
    full_rows, length_of_last = divmod(len(flat), PERIOD)
    even = len(flat) - length_of_last
    sums = flat.new_empty(1, row_count, dtype=_numbers.widened(flat))
    # `narrow` takes half the time of an index, which counts for each of hundreds of tensors.
    full = flat.narrow(0, 0, even).view(-1, PERIOD)
    _sum_rows(full, _column_signs, sums.narrow(1, 0, full_rows))
    if length_of_last:
        last = flat.narrow(0, even, length_of_last)[None]
        _sum_rows(last, _column_signs, sums.narrow(1, full_rows, 1))
    wide = sums[0].to(_summed_in(flat))
    signs = _row_signs(row_count, wide.device, wide.dtype)
    return torch.mv(signs.narrow(1, 0, row_count), wide, out=wide.new_empty(PROJECTIONS))


def _sum_rows(rows: Tensor, table: _Table, sums: Tensor) -> None:
    """Write the signed sum of each row, by each pattern of a table, to ``sums`` of shape ``[patterns, rows]``."""
    width = rows.shape[1]
    # `out` keeps autocast away, which would compute in half precision.
    if rows.dtype in _numbers.HALF and rows.device.type in WIDENING:
        signs = table(rows.device, rows.dtype).narrow(1, 0, width)
        torch.mm(rows, signs.t(), out_dtype=torch.float32, out=sums.t())
        return
    if rows.dtype != sums.dtype and len(rows) > _ROWS_AT_ONCE:
        parts = torch.split(rows, _ROWS_AT_ONCE)
        sums_of_parts = torch.split(sums, _ROWS_AT_ONCE, 1)
        for part, sums_of_part in zip(parts, sums_of_parts, strict=True):
            _sum_rows(part, table, sums_of_part)
        return
    signs = table(rows.device, sums.dtype).narrow(1, 0, width)
    wide = rows.to(sums.dtype)
    for pattern, sums_of_pattern in zip(signs.unbind(), sums.unbind(), strict=True):
        # A matrix product of float32 could be one of TF32, with ten bits.
        torch.mv(wide, pattern, out=sums_of_pattern)


def _of_shard(tensor: Tensor) -> Tensor:
    part = _part(tensor)
    if not part.numel():
        return torch.zeros(PROJECTIONS, dtype=torch.float64, device=part.device)
    places = _dist.places(tensor)
    sizes = _dist.sizes(tensor)
    if tensor.is_complex():
        places.append(torch.arange(2))
        sizes.append(2)
    return _of_block(part, places, sizes)


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
        if whole < _FULL:
            signs = _element_signs(part.device, torch.float64)[:, index]
        else:
            signs_of_rows = _row_signs(math.ceil(whole / PERIOD), part.device, torch.float64)
            (columns,) = _column_signs(part.device, torch.float64)
            signs = signs_of_rows[:, index // PERIOD] * columns[index % PERIOD]
        projections += signs @ piece.reshape(-1).double()
    return projections
