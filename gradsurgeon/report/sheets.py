"""The norms of one series as arrays. Needs numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.store import WholeSeries
from gradsurgeon.store.tables import arrays

if TYPE_CHECKING:
    from gradsurgeon.store.rank_file import StoredSeries

_BLOCK = 2**18  # so many values are converted at a time
_GOLDEN = 0.618

Flags = NDArray[np.bool_]
# Steps and norms of the rows that one cell of a sheet stands for.
Reader = Callable[[int, int], tuple[Ints, Floats]]


@dataclass(frozen=True)
class Sheet:
    """Norms of some tensors in the same steps; a column stands for one row, or for a few rows of a long run.

    Attributes:
        names: of the tensors, one for each line.
        steps: the step of the first row of each column.
        tops: the largest finite norm, NaN where there is none; all arrays have the shape ``[tensors, columns]``.
        sample: the norm of one row of each column, NaN where it is not finite.
        bad: how many norms were not finite.
        there: whether the tensor had a gradient, or a value.
        every: the most rows that a column stands for.
        read: returns steps and norms of the rows of one cell, by line and column.
    """

    names: Sequence[str]
    steps: Ints
    tops: Floats
    sample: Floats
    bad: Ints
    there: Flags
    every: int
    read: Reader


def is_stored(series: WholeSeries) -> bool:
    # Its class needs SQLite, which a session in memory does without.
    return hasattr(series, "one_in")


def blocks(
    series: WholeSeries, start: int = 0, stop: int | None = None, every: int = 1
) -> Iterator[tuple[Ints, Floats, Flags]]:
    """Yield steps, values and which values are there, of successive rows; the number of rows divides by `every`."""
    width = len(series.key.names)
    rows = series.stored(start, stop)
    most = max(1, _BLOCK // max(1, width) // every) * every
    while block := list(islice(rows, most)):
        yield arrays(block, width)


def read_sheet(
    series: WholeSeries, columns: Sequence[int], *, start: int, stop: int, every: int
) -> Sheet:
    """Return the norms of some columns of a series.

    Args:
        series: in memory or in a file, which stays open for as long as a sheet of a long run is in use.
        columns: of the series.
        start: the first row to read.
        stop: the number of the row after the last.
        every: so many rows share a column of the sheet.
    """
    found: list[tuple[Any, ...]] = []
    for steps, values, present in blocks(series, start, stop, every):
        norms, there = values[:, columns].T, present[:, columns].T
        finite = there & np.isfinite(norms)
        tops, bad = np.where(finite, norms, np.float32(np.nan)), there & ~finite
        if every == 1:
            found.append((steps, tops, norms, bad, there))
            continue
        firsts = np.arange(0, len(steps), every)
        # Not always the same one: a tensor may rest in every third step.
        picked = firsts + (np.arange(len(firsts)) * _GOLDEN % 1 * every).astype(np.int64)
        found.append(
            (
                steps[firsts],
                np.fmax.reduceat(tops, firsts, axis=1),
                tops[:, np.minimum(picked, len(steps) - 1)],
                np.add.reduceat(bad, firsts, axis=1).astype(np.uint16),
                np.logical_or.reduceat(there, firsts, axis=1),
            )
        )
    names = [series.key.names[column] for column in columns]
    if not found:
        none = np.empty((len(names), 0), np.float32)
        found = [(np.empty(0, np.int64), none, none, none.astype(bool), none.astype(bool))]
    fields: list[Any] = [np.concatenate(field, axis=-1) for field in zip(*found, strict=True)]
    steps, tops, raw, bad, there = fields

    def read_rows(line: int, column: int) -> tuple[Ints, Floats]:
        if every == 1:
            return steps[column : column + 1], raw[line, column : column + 1]
        first = start + column * every
        stored = cast("StoredSeries", series)
        pairs = stored.between(names[line], first, min(first + every, stop))
        if not pairs:
            raise stored.damaged()
        return np.array([step for step, _ in pairs]), np.array([norm for _, norm in pairs])

    return Sheet(names, steps, tops, tops if every == 1 else raw, bad, there, every, read_rows)


def joined(parts: Sequence[tuple[Sheet, Sequence[int]]], *, once: bool) -> Iterator[Sheet]:
    """Yield the rows of tensors over several series of one rule, in the order of steps.

    A tensor moves to a new series when another optimizer claims it. Where a step has one record, the later counts.

    Args:
        parts: each series with the lines of the tensors.
        once: whether a step has one record of a tensor.
    """
    steps = np.concatenate([sheet.steps for sheet, _ in parts])
    if len(np.unique(steps)) == len(steps):
        yield _ordered(parts, np.argsort(steps))
        return
    for lines in zip(*(lines for _, lines in parts), strict=True):
        own = [(sheet, [line]) for (sheet, _), line in zip(parts, lines, strict=True)]
        there = np.concatenate([sheet.there[line] for sheet, (line,) in own])
        # A row without the tensor says nothing if another series, or another call, has it in the same step.
        order = np.lexsort((there, steps))
        if once:
            order = order[np.append(np.diff(steps[order]) > 0, [True])]
        else:
            order = order[there[order] | ~np.isin(steps[order], steps[there])]
        yield _ordered(own, order)


def _ordered(parts: Sequence[tuple[Sheet, Sequence[int]]], order: Ints) -> Sheet:
    """Return the columns of several sheets as one sheet, in an order of all their columns."""
    owners = np.repeat(np.arange(len(parts)), [len(sheet.steps) for sheet, _ in parts])[order]
    places = np.concatenate([np.arange(len(sheet.steps)) for sheet, _ in parts])[order]

    def read_rows(line: int, column: int) -> tuple[Ints, Floats]:
        sheet, lines = parts[int(owners[column])]
        return sheet.read(lines[line], int(places[column]))

    first, lines = parts[0]
    joint: dict[str, Any] = {"names": [first.names[line] for line in lines], "read": read_rows}
    joint["steps"] = np.concatenate([sheet.steps for sheet, _ in parts])[order]
    for field in ("tops", "sample", "bad", "there"):
        every = [getattr(sheet, field)[lines] for sheet, lines in parts]
        joint[field] = np.concatenate(every, axis=1)[:, order]
    return Sheet(**joint, every=max(sheet.every for sheet, _ in parts))
