"""What a report reads off measurements, whether they are in memory or on disk."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from gradsurgeon.store import Key, RecordedSeries, Records, WholeSeries, merged
from gradsurgeon.store.layout import Stored

STAT = "l2"

# Norms of one training differ from step to step by less than this, in its first steps above all.
TIMES = 10.0
# Of fewer steps nobody can say what is usual.
_LEAST = 20
# So many steps before and after are what a step is compared with: the norm of a whole training falls
# by orders of magnitude, and every step of its beginning is far above its median.
_NEAR = 8


class Spike(NamedTuple):
    """A norm that stands out, and how many times the norms around it; infinite where those are 0."""

    step: int
    value: float
    times: float


class NormHistory(NamedTuple):
    """The norms of one parameter. The numbers are over its finite values, but first and last."""

    norms: tuple[float | None, ...]  # or the largest of each few hundred; None for no gradient
    first: float
    median: float
    largest: float
    spike: Spike | None
    last: float
    nonfinite: int
    nonfinite_step: int  # of the first of them
    zero_since: int | None  # the step from which on all are exactly 0, where some before are not


class Measurements(ABC):
    dropped = 0  # how many rows had to make room
    sampled = 1  # the median is taken over one of so many rows

    def __init__(self, series: Sequence[RecordedSeries]) -> None:
        self._series = series

    def keys(self) -> list[Key]:
        return [series.key for series in self._series]

    @property
    def stats(self) -> frozenset[str]:
        return frozenset(series.key.stat for series in self._series)

    def span(self) -> tuple[int, int] | None:
        """Return the first and the last step, ``None`` where nothing was measured."""
        ends = [end for series in self._series for end in series.ends()]
        return (min(ends), max(ends)) if ends else None

    @abstractmethod
    def keys_of(self, name: str) -> list[Key]:
        """Return the keys of the series that hold an l2 norm of one parameter."""

    @abstractmethod
    def history(self, name: str, rule: str, point: str) -> NormHistory:
        """Return the l2 norms of one parameter, by a rule that has one."""


class WholeMeasurements(Measurements):
    """Measurements of which every row is at hand."""

    @abstractmethod
    def series(self) -> Iterator[tuple[WholeSeries, frozenset[int]]]:
        """Yield every series, with its columns that another one has recorded as well."""

    @abstractmethod
    def one_in(self, every: int, series: WholeSeries) -> Iterator[Stored]:
        """Yield one row in so many of a series."""


class InMemory(WholeMeasurements):
    """The records of a session, or those of a run that fits into memory."""

    def __init__(self, records: Records) -> None:
        super().__init__(list(records))
        self._records = records
        self.dropped = records.dropped

    def series(self) -> Iterator[tuple[WholeSeries, frozenset[int]]]:
        return ((series, frozenset()) for series in self._records)

    def one_in(self, every: int, series: WholeSeries) -> Iterator[Stored]:
        return islice(series.stored(), 0, None, every)

    def keys_of(self, name: str) -> list[Key]:
        return [series.key for series in self._records.series(name, STAT) if series.last(name)]

    def history(self, name: str, rule: str, point: str) -> NormHistory:
        candidates = self._records.series(name, STAT, rule)
        series = [s for s in candidates if s.key.point == point and s.last(name)]
        pairs = merged(series, name)
        # A row may be there for the second call of another module.
        measured = {step for step, _ in pairs}
        missing = [
            (step, None) for s in series for step, _ in s.cells(name) if step not in measured
        ]
        return history_of(pairs, missing)


def history_of(
    pairs: Sequence[tuple[int, float]], missing: Sequence[tuple[int, None]]
) -> NormHistory:
    """Return the history of at least one norm, by step, and of the steps without a gradient."""
    timeline: list[tuple[int, float | None]] = [*pairs, *missing]
    finite = [value for _, value in pairs if math.isfinite(value)]
    nonfinite = []
    if len(finite) < len(pairs):
        nonfinite = [step for step, value in pairs if not math.isfinite(value)]
    return NormHistory(
        # By step alone: a step without a gradient has no value to compare.
        norms=tuple(value for _, value in sorted(timeline, key=itemgetter(0))),
        first=pairs[0][1],
        median=median(finite) if finite else math.nan,
        largest=max(finite, default=math.nan),
        # In a calm training nothing stands out even from the least of all.
        spike=largest_spike(pairs) if finite and max(finite) > TIMES * min(finite) else None,
        last=pairs[-1][1],
        nonfinite=len(nonfinite),
        nonfinite_step=min(nonfinite, default=0),
        zero_since=zero_since(pairs),
    )


def zero_since(pairs: Sequence[tuple[int, float]]) -> int | None:
    """Return the step from which on norms are exactly 0 until the end, ``None`` if they always are or not for long."""
    many = 0
    for _, value in reversed(pairs):
        if value != 0:
            break
        many += 1
    return pairs[-many][0] if _NEAR <= many < len(pairs) else None


def largest_spike(pairs: Sequence[tuple[int, float]]) -> Spike | None:
    finite = [pair for pair in pairs if math.isfinite(pair[1])]
    values = [value for _, value in finite]
    spike: Spike | None = None
    largest = TIMES
    # The first norm has nothing to stand out from: as often as not it is the beginning of a fall.
    for start in range(1, len(values) if len(values) >= _LEAST else 0, _NEAR):
        # What does not stand out from the least of its surroundings need not be compared further.
        lowest = min(values[max(0, start - _NEAR) : start + 2 * _NEAR])
        for index in range(start, min(start + _NEAR, len(values))):
            if values[index] > largest * lowest and (times := _times(values, index)) > largest:
                largest = times
                spike = Spike(*finite[index], times)
        if math.isinf(largest):
            break
    return spike


def _times(values: Sequence[float], index: int) -> float:
    """Return a norm as a multiple of the usual norm of the steps around it."""
    before = values[max(0, index - _NEAR) : index]
    after = values[index + 1 : index + 1 + _NEAR]
    # What comes after it to stay is no spike but a new level; at the end that cannot be known.
    usual = max(median(before), median(after)) if after else max(before)
    if usual > 0:
        return values[index] / usual
    return math.inf if values[index] > 0 else 0.0
