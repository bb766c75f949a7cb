"""Reading a run that is too long to be read whole: by the summaries that its writer left."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gradsurgeon.report.measurements import STAT, NormHistory
from gradsurgeon.report.spikes import Spike, largest_spike
from gradsurgeon.store import Key
from gradsurgeon.store.layout import CHUNK
from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run

# Rows for the median: enough for three digits of it, and few enough for 16 MB.
_SAMPLE_LEAST, _SAMPLE_MOST, _SAMPLE_VALUES = 64, 4096, 4 * 2**20

# Chunks to search for a spike, of those that promise one most.
_CHUNKS = 4


class _SeriesSummary:
    """One series by the summaries of its chunks: arrays with one row per chunk."""

    def __init__(self, series: StoredSeries) -> None:
        self.series = series
        self.width = len(series.key.names)
        self.steps: list[int] = []  # the first of each chunk
        self._maxima, self._nonfinite, self._present = array("f"), array("H"), array("H")
        for chunk in series.summaries():
            self.steps.append(chunk.first)
            self._maxima += chunk.maxima
            self._nonfinite += chunk.nonfinite
            self._present += chunk.present
        most = max(_SAMPLE_LEAST, min(_SAMPLE_MOST, _SAMPLE_VALUES // max(1, self.width)))
        self.every = max(1, -(-len(self.steps) * CHUNK // most))
        self._sample = array("f")
        for row in series.sample(self.every):
            for column in row.absent:
                row.values[column] = math.nan
            self._sample += row.values

    def has(self, name: str) -> bool:
        return any(self._present[self.series.columns[name] :: self.width])

    def tensor(self, name: str) -> _TensorSummary:
        column = slice(self.series.columns[name], None, self.width)
        return _TensorSummary(
            summary=self,
            name=name,
            maxima=self._maxima[column].tolist(),
            nonfinite=self._nonfinite[column].tolist(),
            present=self._present[column].tolist(),
            sample=self._sample[column].tolist(),
        )


@dataclass(frozen=True, slots=True)
class _TensorSummary:
    """One tensor in one series: one entry per chunk, and one row in every few as a sample."""

    summary: _SeriesSummary
    name: str
    maxima: list[float]
    nonfinite: list[int]
    present: list[int]
    sample: list[float]

    def spike(self) -> Spike | None:
        """Return the norm that stands out most.

        It is searched in the chunks whose largest norm is highest above the median of the sample around.
        """
        every = self.summary.every
        promising = []
        for chunk, largest in enumerate(self.maxima):
            around = slice(max(0, (chunk - 1) * CHUNK // every), (chunk + 2) * CHUNK // every + 1)
            near = _finite(self.sample[around])
            if math.isfinite(largest) and largest > 0 and near:
                usual = median(near)
                promising.append((largest / usual if usual > 0 else math.inf, chunk))
        spikes = [
            largest_spike(self.rows(max(0, chunk - 1), chunk + 2))
            for _, chunk in sorted(promising, reverse=True)[:_CHUNKS]
        ]
        return max(filter(None, spikes), key=lambda spike: spike.times, default=None)

    def cells(self) -> list[tuple[int, float | None]]:
        """Return first step and largest value of each chunk, as a sparkline takes them."""
        rows = zip(self.summary.steps, self.maxima, self.nonfinite, self.present, strict=True)
        return [
            (step, (math.nan if nonfinite else largest) if present else None)
            for step, largest, nonfinite, present in rows
        ]

    def rows(self, chunk: int, stop: int | None = None) -> list[tuple[int, float]]:
        """Return step and value of the rows of one chunk, or of those to before another."""
        end = chunk + 1 if stop is None else stop
        return self.summary.series.between(self.name, chunk * CHUNK, end * CHUNK)

    def first_nonfinite(self) -> int:
        rows = self.rows(next(chunk for chunk, many in enumerate(self.nonfinite) if many))
        return next((step for step, value in rows if not math.isfinite(value)), 0)


class OnDisk:
    """The records of a run directory by their summaries.

    What is shown is exact, but for the median, which is that of a sample of the rows, for the
    sparkline, whose cells have the edges of chunks, and for the spike, which is searched where the
    sample promises one.
    """

    dropped = 0

    def __init__(self, run: Run) -> None:
        self._series = list(run.lowest())
        self._summaries: dict[int, _SeriesSummary] = {}
        self._named: dict[str, list[StoredSeries]] = {}
        for series in run:
            for name in series.key.names if series.key.stat == STAT else ():
                of_name = self._named.setdefault(name, [series])
                if of_name[-1] is not series and of_name[-1].rank == series.rank:
                    of_name.append(series)

    @property
    def sampled(self) -> int:
        return max((summary.every for summary in self._summaries.values()), default=1)

    def keys(self) -> list[Key]:
        return [series.key for series in self._series]

    def span(self) -> tuple[int, int] | None:
        ends = [end for series in self._series for end in series.ends()]
        return (min(ends), max(ends)) if ends else None

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
        cells = sorted((c for tensor in tensors for c in tensor.cells()), key=lambda cell: cell[0])
        sample = [value for tensor in tensors for value in _finite(tensor.sample)]
        spikes = [spike for tensor in tensors if (spike := tensor.spike()) is not None]
        first, last = tensors[0], tensors[-1]
        filled = [chunk for chunk, many in enumerate(first.present) if many]
        filled_last = [chunk for chunk, many in enumerate(last.present) if many]
        nonfinite = [tensor for tensor in tensors if any(tensor.nonfinite)]
        return NormHistory(
            norms=tuple(value for _, value in cells),
            first=first.rows(filled[0])[0][1],
            median=median(sample) if sample else math.nan,
            largest=max((v for t in tensors for v in _finite(t.maxima)), default=math.nan),
            spike=max(spikes, key=lambda spike: spike.times, default=None),
            last=last.rows(filled_last[-1])[-1][1],
            nonfinite=sum(sum(tensor.nonfinite) for tensor in nonfinite),
            nonfinite_step=nonfinite[0].first_nonfinite() if nonfinite else 0,
        )

    def _of(self, name: str) -> list[_SeriesSummary]:
        return [
            summary
            for series in self._named.get(name, ())
            if (summary := self._read(series)).has(name)
        ]

    def _read(self, series: StoredSeries) -> _SeriesSummary:
        if id(series) not in self._summaries:
            self._summaries[id(series)] = _SeriesSummary(series)
        return self._summaries[id(series)]


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
