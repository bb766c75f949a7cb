"""The rows of one series as arrays, exact or one for each chunk. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gradsurgeon.errors import RecordError
from gradsurgeon.report.spikes import TIMES, Floats, Ints, Spike, largest_spike
from gradsurgeon.store import WholeSeries
from gradsurgeon.store.layout import CHUNK, summarise
from gradsurgeon.store.tables import arrays

if TYPE_CHECKING:
    from gradsurgeon.store.rank_file import StoredSeries

_BATCH = 2**18  # values of a series in memory that are converted at a time
_SAMPLE_VALUES, _SAMPLE_MOST, _SAMPLE_LEAST = 4 * 2**20, 4096, 64
_CHUNKS = 4  # so many are read in search of a spike
_AROUND = 9  # so many samples around a chunk tell what is usual

Flags = NDArray[np.bool_]


class Part:
    """The rows of one series, exact or one per chunk. Arrays have the shape ``[tensors, rows]``."""

    def __init__(
        self,
        series: WholeSeries,
        columns: Sequence[int],
        *,
        newest: int | None,
        pending: int | None,
        exact: bool,
    ) -> None:
        self.series, self.exact, self.every = series, exact, 1
        self.columns = list(columns)
        self.row = {series.key.names[column]: row for row, column in enumerate(columns)}
        if exact:
            self._read_rows(newest, pending)
        else:
            self._read_summaries(cast("StoredSeries", series), pending)

    def _read_rows(self, newest: int | None, pending: int | None) -> None:
        steps, values, present = [], [], []
        start = 0 if newest is None else max(0, len(self.series) - newest)
        for block in blocks(self.series, start):
            steps.append(block[0])
            values.append(block[1][:, self.columns].T)
            present.append(block[2][:, self.columns].T)
        self.steps: Ints = np.concatenate([np.empty(0, np.int64), *steps])
        empty = np.empty((len(self.columns), 0))
        self.raw: Floats = np.concatenate([empty.astype(np.float32), *values], axis=1)
        self.there: Flags = np.concatenate([empty.astype(bool), *present], axis=1)
        if len(self.steps) > 1 and self.steps[-1] == pending:
            # A pass has left the row for an update that never came.
            self.steps, self.raw, self.there = self.steps[:-1], self.raw[:, :-1], self.there[:, :-1]
        finite = self.there & np.isfinite(self.raw)
        self.tops = np.where(finite, self.raw, np.float32(np.nan))
        self.sample = self.tops
        self.bad = (self.there & ~finite).astype(np.int64)

    def _read_summaries(self, series: StoredSeries, pending: int | None) -> None:
        chunks, width = list(series.summaries()), len(series.key.names)
        self._length = len(series)
        if not chunks:
            raise self.damaged()
        if self._length > 1 and chunks[-1].last == pending:
            self._length -= 1
            rest = [*series.stored((len(chunks) - 1) * CHUNK, self._length)]
            chunks[-1:] = [summarise(rest, width)] if rest else []

        def stacked(field: str) -> Any:
            rows = [np.array(getattr(chunk, field), copy=False) for chunk in chunks]
            return np.stack(rows)[:, self.columns].T

        self.steps = np.array([chunk.first for chunk in chunks], np.int64)
        self.tops, self.bad = stacked("maxima"), stacked("nonfinite").astype(np.int64)
        self.there = stacked("present") > 0
        length = self._length
        most = max(_SAMPLE_LEAST, min(_SAMPLE_MOST, _SAMPLE_VALUES // max(1, width)))
        self.every = max(1, length // most)
        rows = [*series.one_in(self.every, 0, length)]
        self._first, self._last = ([*series.stored(place, place + 1)] for place in (0, length - 1))
        if not (rows and self._first and self._last):
            raise self.damaged()
        self.sample_steps, values, present = arrays(rows, width)
        self.sample = np.where(present, values, np.float32(np.nan))[:, self.columns].T

    @cached_property
    def usual(self) -> Floats:
        """The median of the sample around each chunk, for each tensor."""
        padded = np.pad(self.sample, ((0, 0), (_AROUND // 2, _AROUND // 2)), mode="edge")
        near = np.median(sliding_window_view(padded, _AROUND, axis=1), axis=2)
        places = np.searchsorted(self.sample_steps, self.steps, side="right") - 1
        return np.asarray(near[:, np.maximum(places, 0)])

    def ends(self, row: int) -> tuple[float, float]:
        """Return the first and the last norm of a tensor."""
        places = np.flatnonzero(self.there[row])[[0, -1]].tolist()
        if self.exact:
            return float(self.raw[row, places[0]]), float(self.raw[row, places[1]])
        found = []
        for end, place, rows in zip((0, -1), places, (self._first, self._last), strict=True):
            _, values, present = arrays(rows, len(self.series.key.names))
            column = self.columns[row]
            if present[0, column]:
                found.append(float(values[0, column]))
            else:
                values = self.pairs(row, place, place + 1)[1]
                if not len(values):
                    raise self.damaged()
                found.append(float(values[end]))
        return found[0], found[1]

    def spike(self, row: int) -> Spike | None:
        """Return the norm of a tensor that stands out most, of the chunks that stand out from the sample."""
        near = self.usual[row]
        with np.errstate(all="ignore"):
            near = np.where(near > 0, near, _median(self.sample[row]))
            bounds = np.where(near > 0, self.tops[row] / near, 0)
        found = []
        for chunk in np.argsort(-bounds, kind="stable")[:_CHUNKS].tolist():
            if bounds[chunk] > TIMES:
                steps, norms = self.pairs(row, chunk - 1, chunk + 2)
                finite = np.isfinite(norms)
                found.append(largest_spike(steps[finite], norms[finite]))
        return max(filter(None, found), key=lambda spike: spike.times, default=None)

    def damaged(self) -> RecordError:
        """Return the error for summaries that do not fit their rows."""
        return cast("StoredSeries", self.series).damaged()

    def pairs(self, row: int, start: int, stop: int) -> tuple[Ints, Floats]:
        """Return steps and norms of one tensor in some chunks, which are read anew."""
        name = self.series.key.names[self.columns[row]]
        series = cast("StoredSeries", self.series)
        found = series.between(name, max(0, start) * CHUNK, min(stop * CHUNK, self._length))
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, np.int64), np.array(values, float)


def _median(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else np.nan


def is_stored(series: WholeSeries) -> bool:
    # Its class needs SQLite, which a session in memory does without.
    return hasattr(series, "summaries")


def blocks(series: WholeSeries, start: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield steps, values and which values are present, of successive rows from one on."""
    width = len(series.key.names)
    if is_stored(series):
        batches: Iterator[Any] = cast("StoredSeries", series).batches(start)
    else:
        rows = islice(series.stored(), start, None)
        batches = iter(lambda: list(islice(rows, max(1, _BATCH // max(1, width)))), [])
    return (arrays(rows, width) for rows in batches)


def joined(parts: Sequence[tuple[Part, int]], *, once: bool) -> tuple[Ints, Floats, Ints, Flags]:
    """Return the rows of a tensor over several series of one rule, in the order of steps.

    A tensor moves to a new series when another optimizer claims it. Where a step has one record, the later counts.
    """
    if len(parts) == 1 and once:
        part, row = parts[0]
        return part.steps, part.tops[row], part.bad[row], part.there[row]
    fields = [(part.steps, part.tops[row], part.bad[row], part.there[row]) for part, row in parts]
    steps, tops, bad, there = (np.concatenate(field) for field in zip(*fields, strict=True))
    # A row without the tensor says nothing if another series, or another call, has it in the same step.
    order = np.lexsort((there, steps))
    if once:
        order = order[np.append(np.diff(steps[order]) > 0, [True])]
    else:
        order = order[there[order] | ~np.isin(steps[order], steps[there])]
    return steps[order], tops[order], bad[order], there[order]
