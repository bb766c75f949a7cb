"""Norms as arrays over time, as pictures need them. Needs numpy, which matplotlib brings.

A series is read in blocks and put into columns as it comes, so that a run of any length takes a few
megabytes. A column stands for one step, or, of a long run, for several, by the largest norm in them: what lasts
one step survives, as in the sparklines of the report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradsurgeon.report.measurements import STAT, WholeMeasurements
from gradsurgeon.report.whole_norm import with_same_steps
from gradsurgeon.store import Key, WholeSeries

# Fewer than a picture has pixels, beside the longest names: what falls between two pixels is lost.
COLUMNS = 800
# Values read at a time, and rows that are asked for how far apart steps are.
_BLOCK, _ASKED = 2**20, 1000
# What float32 can hold, in fifths of a decade.
DECADES = np.linspace(-46, 39, 426)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]


class Columns(NamedTuple):
    """Equal columns over time: ``number`` of them, each of ``width`` steps, of which one in ``every`` has records."""

    first: int
    every: int
    width: int
    number: int

    @property
    def steps(self) -> Counts:
        """The first step of each column."""
        return self.first + self.width * np.arange(self.number)

    @property
    def edges(self) -> tuple[float, float]:
        """Where the first column begins and the last one ends, if each record stands in the middle of its share."""
        begin = self.first - self.every / 2
        return begin, begin + self.width * self.number

    def of(self, steps: Counts) -> Counts:
        return (steps - self.first) // self.width


class Block(NamedTuple):
    """Successive rows of a series: their steps, and values of some tensors; ``present`` tells which there are."""

    steps: Counts
    tensors: Counts
    values: Floats
    present: Flags

    @property
    def finite(self) -> Flags:
        return self.present & np.isfinite(self.values)


@dataclass(frozen=True)
class Largest:
    """The largest finite norm per tensor and column, NaN where there is none, and what else was in them.

    Attributes:
        values: tensors x columns.
        nonfinite: how many records were not finite.
        measured: something was measured then, be it that there was no gradient.
    """

    values: Floats
    nonfinite: Counts
    measured: Flags

    def path(self, tensor: int, columns: Columns) -> tuple[Floats, Floats]:
        """Return steps and norms of one tensor for a line with a NaN at each gap; a log axis has no place for 0.

        A gap is where a gradient was missing, or where no rule has looked for longer than usual.
        """
        at = np.flatnonzero(self.measured[tensor])
        steps, values = columns.steps[at].astype(np.float64), self.values[tensor, at]
        distances = np.diff(at)
        late = np.flatnonzero(distances > np.median(distances)) if len(distances) else distances
        steps = np.insert(steps, late + 1, steps[late] + columns.width)
        return steps, np.insert(np.where(values > 0, values, np.nan), late + 1, np.nan)


class NormsOverTime:
    """The l2 norms of some tensors, each from the records of one rule at one point."""

    def __init__(self, measurements: WholeMeasurements, keys: Mapping[str, Key]) -> None:
        self.names = tuple(keys)
        self._series = list(_with_columns(measurements, keys))

    @cached_property
    def columns(self) -> Columns:
        ends = [end for series, _, _ in self._series for end in series.ends()]
        asked = (
            np.array([row[0] for row in islice(s.stored(), _ASKED)]) for s, _, _ in self._series
        )
        first, last = min(ends), max(ends)
        starts = np.array([series.ends()[0] for series, _, _ in self._series])
        gaps = np.concatenate([starts - first, *(np.diff(steps) for steps in asked)])
        every = int(np.gcd.reduce(np.abs(gaps))) or 1
        number = (last - first) // every + 1
        width = every * -(-number // COLUMNS)
        return Columns(first, every, width, (last - first) // width + 1)

    def _blocks(self, of: Collection[WholeSeries] | None = None) -> Iterator[Block]:
        for series, tensors, places in self._series:
            if of is not None and series not in of:
                continue
            for block in _blocks(series, np.array(tensors), np.array(places)):
                # What is still being trained goes on meanwhile, and its new steps have no column.
                column = self.columns.of(block.steps)
                known = (column >= 0) & (column < self.columns.number)
                if known.any():
                    steps, values, present = (
                        block.steps[known],
                        block.values[known],
                        block.present[known],
                    )
                    yield Block(steps, block.tensors, values, present)

    def largest(self) -> Largest:
        return self._largest(self._blocks(), len(self.names))

    def wholes(self, names: Collection[str]) -> Iterator[tuple[list[str], Largest]]:
        """Yield the norms of tensors together, for those whose norms add up: of one point, in the same steps."""
        named = {
            series: [self.names[tensor] for tensor in tensors if self.names[tensor] in names]
            for series, tensors, _ in self._series
        }
        for group in with_same_steps([series for series, found in named.items() if found]):
            found = [name for series in group for name in named[series]]
            yield found, self._whole(self._blocks(group), [self.names.index(one) for one in found])

    def _whole(self, blocks: Iterable[Block], tensors: Collection[int]) -> Largest:
        steps, squares, bad = [], [], []
        for block in blocks:
            of = np.isin(block.tensors, list(tensors))
            rows = block.present[:, of].any(axis=1)
            values, finite = block.values[rows][:, of], block.finite[rows][:, of]
            steps.append(block.steps[rows])
            squares.append(np.square(np.where(finite, values, 0.0)).sum(axis=1))
            bad.append((block.present[rows][:, of] & ~finite).any(axis=1))
        each, back = np.unique(np.concatenate(steps), return_inverse=True)
        norms = np.sqrt(np.bincount(back, np.concatenate(squares), len(each)))
        broken = np.bincount(back, np.concatenate(bad), len(each)) > 0
        found = Block(
            each, np.array([0]), np.where(broken, np.nan, norms)[:, None], each[:, None] >= 0
        )
        return self._largest([found], 1)

    def density(self) -> tuple[Counts, Counts]:
        """Return how many norms there are, columns x `DECADES`, zero left out, and how many are not finite."""
        bins = len(DECADES) - 1
        counts, nonfinite = (np.zeros(self.columns.number * n, dtype=np.int64) for n in (bins, 1))
        for block in self._blocks():
            at = np.broadcast_to(self.columns.of(block.steps)[:, None], block.values.shape)
            drawn = block.finite & (block.values > 0)
            height = np.digitize(np.log10(block.values[drawn]), DECADES[1:-1])
            counts += np.bincount(at[drawn] * bins + height, minlength=len(counts))
            bad = block.present & ~np.isfinite(block.values)
            nonfinite += np.bincount(at[bad], minlength=len(nonfinite))
        return counts.reshape(-1, bins), nonfinite

    def _largest(self, blocks: Iterable[Block], tensors: int) -> Largest:
        shape = self.columns.number, tensors
        values, nonfinite = np.full(shape, -np.inf), np.zeros(shape, dtype=np.int64)
        measured = np.zeros(shape, dtype=bool)
        for block in blocks:
            order, starts, at = self._runs(block.steps)
            finite = block.finite[order]
            tops = np.where(finite, block.values[order], -np.inf)
            where = np.ix_(at, block.tensors)
            values[where] = np.maximum(values[where], np.maximum.reduceat(tops, starts))
            bad = (block.present[order] & ~finite).astype(np.int64)
            nonfinite[where] += np.add.reduceat(bad, starts)
            measured[where] = True
        values[np.isneginf(values)] = np.nan
        return Largest(values.T, nonfinite.T, measured.T)

    def _runs(self, steps: Counts) -> tuple[Any, Counts, Counts]:
        """Return an order by column, where each column begins in it, and which columns these are."""
        columns = self.columns.of(steps)
        order = np.argsort(columns, kind="stable")
        starts = np.flatnonzero(np.diff(columns[order], prepend=-1))
        return order, starts, columns[order][starts]


def _with_columns(
    measurements: WholeMeasurements, keys: Mapping[str, Key]
) -> Iterator[tuple[WholeSeries, list[int], list[int]]]:
    """Yield each series that has some of the tensors, with their places in ``keys`` and in its rows."""
    place = {name: number for number, name in enumerate(keys)}
    for series, repeated in measurements.series():
        rule, stat, point, names = series.key
        wanted = [
            (place[name], column)
            for column, name in enumerate(names)
            if name in keys
            and column not in repeated
            and (keys[name].rule, keys[name].point) == (rule, point)
        ]
        if wanted and stat == STAT and series.ends():
            tensors, columns = zip(*wanted, strict=True)
            yield series, list(tensors), list(columns)


def _blocks(series: WholeSeries, tensors: Counts, places: Counts) -> Iterator[Block]:
    width = len(series.key.names)
    rows = series.stored()
    while batch := list(islice(rows, max(1, _BLOCK // width))):
        steps, values, absent = zip(*batch, strict=True)
        floats = np.frombuffer(b"".join(values), "<f4").reshape(-1, width)
        none = bytes(-(-width // 8))
        bits = np.frombuffer(b"".join(one or none for one in absent), np.uint8)
        flags = np.unpackbits(bits.reshape(len(batch), -1), axis=1, bitorder="little")
        present = flags[:, places] == 0
        yield Block(np.array(steps), tensors, floats[:, places].astype(np.float64), present)
