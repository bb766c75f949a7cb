"""Reading a run that is too long to be read whole: by the summaries that its writer left."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, compress, repeat
from operator import gt, itemgetter, mul
from statistics import median
from typing import NamedTuple, cast

from gradsurgeon.report.measurements import (
    STAT,
    TIMES,
    NormHistory,
    Spike,
    WholeMeasurements,
    largest_spike,
    zero_since,
)
from gradsurgeon.store import Key, WholeSeries
from gradsurgeon.store.layout import CHUNK, Stored
from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run, of_lowest_ranks

# Rows for the median: enough for three digits of it, and few enough for 16 MB.
_SAMPLE_LEAST, _SAMPLE_MOST, _SAMPLE_VALUES = 64, 4096, 4 * 2**20

# Chunks to search for a spike, of those that promise one most.
_CHUNKS = 4
# Rows beside a chunk that a spike at its edge is compared with.
_MARGIN = 32


class _SeriesSummary:
    """One series by the summaries of its chunks: arrays with one row per chunk."""

    def __init__(self, series: StoredSeries) -> None:
        self.series = series
        self.width = len(series.key.names)
        self.steps: list[int] = []  # the first of each chunk
        self._maxima, self._minima = array("f"), array("f")
        self._nonfinite, self._present = array("H"), array("H")
        for chunk in series.summaries():
            self.steps.append(chunk.first)
            self._maxima += chunk.maxima
            self._minima += chunk.minima
            self._nonfinite += chunk.nonfinite
            self._present += chunk.present
        most = max(_SAMPLE_LEAST, min(_SAMPLE_MOST, _SAMPLE_VALUES // max(1, self.width)))
        self.every = max(1, -(-len(self.steps) * CHUNK // most))
        self._sample = array("f")
        for row in series.sample(self.every):
            for column in row.absent:
                row.values[column] = math.nan
            self._sample += row.values
        length = len(series)
        self._ends = [
            row for place in (0, length - 1) for row in series.rows(max(0, place), place + 1)
        ]

    def end(self, column: int, place: int) -> float | None:
        """Return what the first row (place 0) or the last one (place -1) has of a column."""
        row = self._ends[place]
        return None if column in row.absent else row.values[column]

    def has(self, name: str) -> bool:
        return any(self._present[self.series.columns[name] :: self.width])

    def tensor(self, name: str) -> _TensorSummary:
        column = slice(self.series.columns[name], None, self.width)
        maxima, minima, sample = (
            floats[column].tolist() for floats in (self._maxima, self._minima, self._sample)
        )
        nonfinite, present = (
            counts[column].tolist() for counts in (self._nonfinite, self._present)
        )
        return _TensorSummary(self, name, maxima, minima, nonfinite, present, sample)


class _TensorSummary(NamedTuple):
    """One tensor in one series: one entry per chunk, and one row in every few as a sample."""

    summary: _SeriesSummary
    name: str
    maxima: list[float]
    minima: list[float]
    nonfinite: list[int]
    present: list[int]
    sample: list[float]

    def spike(self) -> Spike | None:
        """Return the largest spike of the chunks whose norms are highest above the sample around them."""
        every = self.summary.every
        minima = self.minima
        if not math.isfinite(sum(minima)):
            # Where nothing is finite there is nothing to stand out from.
            minima = [least if least == least else math.inf for least in minima]  # noqa: PLR0124 # NaN
        beside = list(map(min, minima, [math.inf, *minima[:-1]], [*minima[1:], math.inf]))
        # A spike stands out from something beside it, and from the usual no more than from the least.
        standing_out = map(gt, self.maxima, map(mul, beside, repeat(TIMES)))
        bounds = [
            (self.maxima[chunk] / beside[chunk] if beside[chunk] > 0 else math.inf, chunk)
            for chunk in compress(range(len(beside)), standing_out)
        ]
        promising: list[tuple[float, int]] = []
        for bound, chunk in sorted(bounds, reverse=True):
            if len(promising) == _CHUNKS and bound <= promising[0][0]:
                break
            around = slice(max(0, (chunk - 1) * CHUNK // every), (chunk + 2) * CHUNK // every + 1)
            if near := _finite(self.sample[around]):
                usual = median(near)
                times = self.maxima[chunk] / usual if usual > 0 else math.inf
                # The least promising one comes first, and makes room.
                heappush(promising, (times, chunk))
                if len(promising) > _CHUNKS:
                    heappop(promising)
        return _largest(
            largest_spike(self.rows(chunk * CHUNK - _MARGIN, (chunk + 1) * CHUNK + _MARGIN))
            for _, chunk in promising
        )

    def cells(self) -> list[tuple[int, float | None]]:
        """Return first step and largest value of each chunk, as a sparkline takes them."""
        if all(self.present) and not any(self.nonfinite):
            return list(zip(self.summary.steps, self.maxima, strict=True))
        rows = zip(self.summary.steps, self.maxima, self.nonfinite, self.present, strict=True)
        return [
            (step, (math.nan if nonfinite else largest) if present else None)
            for step, largest, nonfinite, present in rows
        ]

    def rows(self, start: int, stop: int) -> list[tuple[int, float]]:
        return self.summary.series.between(self.name, max(0, start), stop)

    def end(self, place: int) -> float:
        """Return the first value (place 0) or the last one (place -1)."""
        value = self.summary.end(self.summary.series.columns[self.name], place)
        if value is not None:
            return value
        chunk = [chunk for chunk, present in enumerate(self.present) if present][place]
        return self.rows(chunk * CHUNK, (chunk + 1) * CHUNK)[place][1]

    def first_nonfinite(self) -> int:
        chunk = next(chunk for chunk, many in enumerate(self.nonfinite) if many)
        rows = self.rows(chunk * CHUNK, (chunk + 1) * CHUNK)
        return next((step for step, value in rows if not math.isfinite(value)), 0)

    def zero_since(self) -> int | None:
        alive = [
            chunk
            for chunk, most in enumerate(map(max, self.maxima, self.nonfinite))
            if self.present[chunk] and most > 0
        ]
        if not alive:
            return None
        # All chunks after these two are 0 throughout, or they would be alive.
        start = alive[-1] * CHUNK
        return zero_since(self.rows(start, start + 2 * CHUNK))


class OnDisk(WholeMeasurements):
    """The records of a run directory by their summaries.

    What is shown is exact, but for the median, which is that of a sample of the rows, for the
    sparkline, whose cells have the edges of chunks, and for the spike, which is searched where the
    sample promises one.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(list(run.lowest()))
        self._run = run
        self._summaries: dict[StoredSeries, _SeriesSummary] = {}

    def series(self) -> Iterator[tuple[StoredSeries, frozenset[int]]]:
        return of_lowest_ranks(self._run)

    def one_in(self, every: int, series: WholeSeries) -> Iterator[Stored]:
        stored = cast("StoredSeries", series)
        if every == 1:
            yield from stored.stored()
            return
        for number in range(0, len(stored), every):
            yield from stored.stored(number, number + 1)

    def keys_of(self, name: str) -> list[Key]:
        return [summary.series.key for summary in self._of(name)]

    def history(self, name: str, rule: str, point: str) -> NormHistory:
        tensors = [
            summary.tensor(name)
            for summary in self._of(name)
            if (summary.series.key.rule, summary.series.key.point) == (rule, point)
        ]
        # A tensor moves on from series to series, so that they follow each other.
        tensors.sort(key=lambda tensor: tensor.summary.steps[0])
        cells = tensors[0].cells()
        if len(tensors) > 1:
            joined = (cell for tensor in tensors for cell in tensor.cells())
            cells = sorted(joined, key=lambda cell: cell[0])
        sample = [value for tensor in tensors for value in _finite(tensor.sample)]
        nonfinite = [tensor for tensor in tensors if any(tensor.nonfinite)]
        last = tensors[-1].end(-1)
        return NormHistory(
            norms=tuple(map(itemgetter(1), cells)),
            first=tensors[0].end(0),
            median=median(sample) if sample else math.nan,
            largest=max(chain.from_iterable(_finite(t.maxima) for t in tensors), default=math.nan),
            spike=_largest(tensor.spike() for tensor in tensors),
            last=last,
            nonfinite=sum(sum(tensor.nonfinite) for tensor in nonfinite),
            nonfinite_step=nonfinite[0].first_nonfinite() if nonfinite else 0,
            zero_since=tensors[-1].zero_since() if last == 0 else None,
        )

    def _of(self, name: str) -> list[_SeriesSummary]:
        found = [self._read(series) for series in self._run.series(name, STAT)]
        return [summary for summary in found if summary.has(name)]

    def _read(self, series: StoredSeries) -> _SeriesSummary:
        if series not in self._summaries:
            summary = self._summaries[series] = _SeriesSummary(series)
            self.sampled = max(self.sampled, summary.every)
        return self._summaries[series]


def _finite(values: Sequence[float]) -> Sequence[float]:
    # In double precision the sum of float32 cannot overflow: it tells at once whether all are finite.
    if math.isfinite(sum(values)):
        return values
    return [value for value in values if math.isfinite(value)]


def _largest(spikes: Iterable[Spike | None]) -> Spike | None:
    return max(filter(None, spikes), key=lambda spike: spike.times, default=None)
