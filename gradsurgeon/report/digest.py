"""Reading a run that is too long to be read whole: by the summaries that its writer left."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from gradsurgeon.report.measured import STAT, Line
from gradsurgeon.report.spikes import Spike, largest
from gradsurgeon.store import Key
from gradsurgeon.store.layout import CHUNK
from gradsurgeon.store.rankfile import StoredSeries
from gradsurgeon.store.run import Run

# Rows for the median: enough for three digits of it, and few enough for 16 MB.
_SAMPLE_LEAST, _SAMPLE_MOST, _SAMPLE_VALUES = 64, 4096, 4 * 2**20

# Chunks to look for a spike in, of those that promise one most.
_CHUNKS = 4

Pairs = Sequence[tuple[int, float]]


class _Digest:
    """One series by its summaries: arrays with one row per chunk."""

    def __init__(self, series: StoredSeries) -> None:
        self.series = series
        self.width = len(series.key.names)
        self.steps: list[tuple[int, int]] = []
        self._maxima, self._nonfinite, self._present = array("f"), array("H"), array("H")
        for one in series.summaries():
            self.steps.append((one.first, one.last))
            self._maxima += one.maxima
            self._nonfinite += one.nonfinite
            self._present += one.present
        most = max(_SAMPLE_LEAST, min(_SAMPLE_MOST, _SAMPLE_VALUES // max(1, self.width)))
        self.every = max(1, -(-len(self.steps) * CHUNK // most))
        self._sample = array("f")
        for row in series.rows(every=self.every):
            for column in row.absent:
                row.values[column] = math.nan
            self._sample += row.values

    def part(self, name: str) -> _Part:
        """Return what the summaries say of one tensor."""
        column, step = self.series.columns[name], self.width
        return _Part(
            digest=self,
            name=name,
            maxima=self._maxima[column::step].tolist(),
            nonfinite=self._nonfinite[column::step].tolist(),
            present=self._present[column::step].tolist(),
            drawn=self._sample[column::step],
        )

    def has(self, name: str) -> bool:
        """Tell whether there is a value of a tensor at all."""
        return any(self._present[self.series.columns[name] :: self.width])


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor in one series: one entry per chunk."""

    digest: _Digest
    name: str
    maxima: list[float]
    nonfinite: list[int]
    present: list[int]
    drawn: array[float]

    @property
    def sample(self) -> list[float]:
        """Finite values of one row in every few."""
        return [value for value in self.drawn if math.isfinite(value)]

    def tops(self) -> list[float]:
        """Return the largest finite value of each chunk that has one."""
        return [top for top in self.maxima if math.isfinite(top)]

    def spike(self) -> Spike | None:
        """Return the norm that stands out most, in the chunks whose largest one promises it.

        Those are told by the median of the sample around them; the steps around it tell for sure.
        """
        every = self.digest.every
        promising = []
        for chunk, top in enumerate(self.maxima):
            around = slice(max(0, (chunk - 1) * CHUNK // every), (chunk + 2) * CHUNK // every + 1)
            near = [value for value in self.drawn[around] if math.isfinite(value)]
            if math.isfinite(top) and top > 0 and near:
                usual = median(near)
                promising.append((top / usual if usual > 0 else math.inf, chunk))
        best: Spike | None = None
        for _, chunk in sorted(promising, reverse=True)[:_CHUNKS]:
            pairs = [pair for c in range(max(0, chunk - 1), chunk + 2) for pair in self.rows(c)]
            found = largest(pairs)
            if found is not None and (best is None or found.times > best.times):
                best = found
        return best

    def cells(self) -> list[tuple[int, float | None]]:
        """Return first step and largest value of each chunk, as a sparkline takes them."""
        found: list[tuple[int, float | None]] = []
        for steps, top, bad, there in zip(
            self.digest.steps, self.maxima, self.nonfinite, self.present, strict=True
        ):
            found.append((steps[0], (math.nan if bad else top) if there else None))
        return found

    def rows(self, chunk: int) -> Pairs:
        """Return step and value of the rows of one chunk."""
        return self.digest.series.between(self.name, chunk * CHUNK, (chunk + 1) * CHUNK)

    def chunk(self, good: Callable[[int], bool], *, last: bool = False) -> int:
        """Return the first or the last chunk that fulfils a condition."""
        chunks = range(len(self.present))
        return next(chunk for chunk in (reversed(chunks) if last else chunks) if good(chunk))


class OnDisk:
    """The records of a run directory by their summaries.

    What is shown is exact, but for the median, which is that of a sample of the rows, for the
    sparkline, whose cells have the edges of chunks, and for the spike, which is looked for where the
    sample promises one.
    """

    dropped = 0

    def __init__(self, run: Run) -> None:
        self._series = list(run.lowest())
        self._digests: dict[int, _Digest] = {}
        self._named: dict[str, list[StoredSeries]] = {}
        for series in run:
            for name in series.key.names if series.key.stat == STAT else ():
                own = self._named.setdefault(name, [series])
                if own[-1] is not series and own[-1].rank == series.rank:
                    own.append(series)

    @property
    def sampled(self) -> int:
        """The median is taken over one of so many rows."""
        return max((digest.every for digest in self._digests.values()), default=1)

    def keys(self) -> list[Key]:
        """Return the keys of all series."""
        return [series.key for series in self._series]

    def span(self) -> tuple[int, int] | None:
        """Return the first and the last step, ``None`` where nothing was measured."""
        ends = [end for series in self._series if len(series) for end in series.ends()]
        return (min(ends), max(ends)) if ends else None

    def having(self, name: str) -> list[Key]:
        """Return the keys of the series that hold an l2 norm of one parameter."""
        return [digest.series.key for digest in self._of(name)]

    def line(self, name: str, rule: str, point: str) -> Line:
        """Return the history of the l2 norm of one parameter, by a rule that has one."""
        own = [
            digest.part(name)
            for digest in self._of(name)
            if (digest.series.key.rule, digest.series.key.point) == (rule, point)
        ]
        # A tensor moves on from series to series, so that they follow each other.
        own.sort(key=lambda part: part.digest.steps[0])
        cells = sorted((cell for part in own for cell in part.cells()), key=lambda cell: cell[0])
        sample = [value for part in own for value in part.sample]
        return Line(
            history=tuple(value for _, value in cells),
            first=own[0].rows(own[0].chunk(lambda c: own[0].present[c] > 0))[0][1],
            middle=median(sample) if sample else math.nan,
            top=max((top for part in own for top in part.tops()), default=math.nan),
            spike=max(
                (spike for part in own if (spike := part.spike()) is not None),
                key=lambda spike: spike.times,
                default=None,
            ),
            last=own[-1].rows(own[-1].chunk(lambda c: own[-1].present[c] > 0, last=True))[-1][1],
            nonfinite=sum(sum(part.nonfinite) for part in own),
            nonfinite_step=_first_nonfinite(own),
        )

    def _of(self, name: str) -> list[_Digest]:
        digests = [self._digest(series) for series in self._named.get(name, ())]
        return [digest for digest in digests if digest.has(name)]

    def _digest(self, series: StoredSeries) -> _Digest:
        if id(series) not in self._digests:
            self._digests[id(series)] = _Digest(series)
        return self._digests[id(series)]


def _first_nonfinite(parts: Sequence[_Part]) -> int:
    for part in parts:
        if any(part.nonfinite):
            rows = part.rows(part.chunk(lambda c, part=part: part.nonfinite[c] > 0))  # type: ignore[misc]
            return next((step for step, value in rows if not math.isfinite(value)), 0)
    return 0
