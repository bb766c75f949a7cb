"""The norms of all tensors over time, in as few numbers as a page can hold: the largest of every few steps.

A spike of one step and a norm that is not finite survive that, however long the run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import log10
from typing import NamedTuple

from gradsurgeon.store.layout import Stored, Summary, unpack_absent
from gradsurgeon.store.rank_file import StoredSeries

# A cell is the logarithm of a norm, in the smallest steps at which all norms of float32 fit: it is right
# to two digits.
LOWEST, STEP = -46.0, 0.0013
ABSENT, ZERO, FIRST, NONFINITE = 0, 1, 2, 0xFFFF
MOST_COLUMNS, _LEAST_COLUMNS, _MOST_CELLS = 1500, 200, 750_000
# So many values are read as they are; of more the summaries are read.
MOST_VALUES = 20 * 2**20


class HeatMap(NamedTuple):
    """Cells by row and column, with the steps that each column stands for.

    Attributes:
        names: of the rows.
        firsts: the first step of each column.
        lasts: the last one that was recorded.
        cells: row after row, as `code` makes them of the largest norm.
        groups: by series the cells of all its columns.
    """

    names: tuple[str, ...]
    firsts: list[int]
    lasts: list[int]
    cells: array[int]
    groups: Mapping[StoredSeries, Sequence[Group]]


class Group(NamedTuple):
    """Successive rows of a series by the cells of their largest values."""

    column: int
    first: int
    last: int
    cells: array[int]


def code(norm: float) -> int:
    """Return a norm as a cell: larger norms have larger cells, and what is not finite the largest."""
    if norm > 0:
        if norm == math.inf:
            return NONFINITE
        return int((log10(norm) - LOWEST) / STEP + 0.5) + FIRST
    return NONFINITE if math.isnan(norm) else ZERO


def heat_map(names: Sequence[str], series: Mapping[StoredSeries, Sequence[str]]) -> HeatMap:
    """Return the norms of tensors.

    Args:
        names: of the rows, in their order.
        series: what is shown, each with the names of the tensors that it is shown for.
    """
    most = max(_LEAST_COLUMNS, min(MOST_COLUMNS, _MOST_CELLS // max(1, len(names))))
    ends = [end for one in series for end in one.ends()]
    # The same steps for all series, whose rows may be of others.
    width = -(-(max(ends) - min(ends) + 1) // most) if ends else 1
    grouped = {one: list(_groups(one, width)) for one in series}
    spans: dict[int, tuple[int, int]] = {}
    for group in chain.from_iterable(grouped.values()):
        first, last = spans.get(group.column, (group.first, group.last))
        spans[group.column] = min(first, group.first), max(last, group.last)
    order = sorted(spans)
    place = {column: at for at, column in enumerate(order)}
    found = {name: array("H", bytes(2 * len(order))) for name in names}
    for one, groups in grouped.items():
        places = [place[group.column] for group in groups]
        # The cells of one tensor lie at equal distances.
        cells = array("H", b"".join(group.cells.tobytes() for group in groups))
        for name in series[one]:
            row, mine = found[name], cells[one.columns[name] :: len(one.key.names)]
            for column, cell in zip(places, mine, strict=True):
                row[column] = max(row[column], cell)
    joined = array("H", b"".join(found[name].tobytes() for name in names))
    firsts, lasts = ([spans[column][end] for column in order] for end in (0, 1))
    return HeatMap(tuple(names), firsts, lasts, joined, grouped)


def _groups(series: StoredSeries, width: int) -> Iterator[Group]:
    """Yield the rows of every so many steps together; of a long series by its summaries."""
    columns, length = len(series.key.names), len(series)
    if length * columns > MOST_VALUES:
        for column, chunks in groupby(series.summaries(), lambda chunk: chunk.first // width):
            several = list(chunks)
            yield Group(column, several[0].first, several[-1].last, _summarised(several))
        return
    for column, rows in groupby(series.stored(), lambda row: row[0] // width):
        stored = list(rows)
        yield Group(column, stored[0][0], stored[-1][0], _largest(stored, columns))


def _summarised(chunks: Sequence[Summary]) -> array[int]:
    if all(all(chunk.present) and not any(chunk.nonfinite) for chunk in chunks):
        return _of_largest([chunk.maxima for chunk in chunks])
    found = array("H", bytes(2 * len(chunks[0].maxima)))
    for chunk in chunks:
        for column, (norm, nonfinite, present) in enumerate(
            zip(chunk.maxima, chunk.nonfinite, chunk.present, strict=True)
        ):
            if present:
                found[column] = max(found[column], NONFINITE if nonfinite else code(norm))
    return found


def _largest(rows: Sequence[Stored], width: int) -> array[int]:
    parts = [array("f", floats) for _, floats, _ in rows]
    # In double precision the sum of float32 cannot overflow: it tells at once whether all are finite.
    whole = not any(any(bits or b"") for _, _, bits in rows)
    if whole and math.isfinite(sum(map(sum, parts))):
        return _of_largest(parts)
    holes = [unpack_absent(bits) for _, _, bits in rows]
    cells = array("H", bytes(2 * width))
    for part, hole in zip(parts, holes, strict=True):
        for column, norm in enumerate(part):
            if column not in hole:
                cells[column] = max(cells[column], code(norm))
    return cells


def _of_largest(parts: Sequence[array[float]]) -> array[int]:
    """Return the cells of the largest of each column; all are there and finite, as nearly always."""
    largest = list(map(max, *parts)) if len(parts) > 1 else parts[0]
    if min(largest) > 0:
        return array("H", [int((log10(v) - LOWEST) / STEP + 0.5) + FIRST for v in largest])
    return array("H", map(code, largest))


def norm_of(cell: int) -> float:
    """Return the norm of a cell that has one, to two digits."""
    return float(10 ** (LOWEST + (cell - FIRST) * STEP))
