"""What suggestions need of the records of a run: how each parameter behaves, and the norms of groups.

A series is read twice, a row at a time: a sample of it for how parameters behave, and all of it for the
norms of the groups. What is kept is four bytes per step and group.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median, quantiles
from typing import NamedTuple

from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run, events_after, of_lowest_ranks

STAT = "l2"
_POINTS = ("accumulated", "step")  # the better one last: there a norm is that of the final gradient
_SKIPS = frozenset({"skipped-step", "scaler-skip"})
# Values that tell how parameters behave, and rows of them even of a model with many parameters.
_SAMPLED, _LEAST_ROWS = 2**22, 64
_TINY = 1e-38  # below it a float32 loses its digits
_LARGEST = 3.4e38  # above it a norm is infinite to the rule, and to the array that keeps it
# A step that lacks its record here and there, as where a scaler has skipped it, makes no series sparse.
_SPARSE = 0.05


class Behaviour(NamedTuple):
    """How large the norms of one parameter are, how far apart, and where they go.

    Attributes:
        name: of the parameter.
        measures: logarithms of the median, of the spread, and of how many times the median of the first half
            of the steps that of the second half is.
    """

    name: str
    measures: tuple[float, float, float]


@dataclass(slots=True)
class GroupNorms:
    """The norms over a group of parameters, oldest first, and what was left out of them.

    Attributes:
        norms: those that are finite.
        first: the step of the first one.
        last: that of the last one.
        nonfinite: how many are not.
        skipped: how many belong to an update that did not take place.
        every: one step in so many was recorded.
    """

    norms: "array[float]" = field(default_factory=lambda: array("f"))
    first: int = 0
    last: int = 0
    nonfinite: int = 0
    skipped: int = 0
    every: int = 1

    def add(self, step: int, norm: float) -> None:
        if not norm < _LARGEST:  # or NaN
            self.nonfinite += 1
            return
        if not self.norms:
            self.first = step
        self.last = step
        self.norms.append(norm)


def sources(run: Run) -> dict[StoredSeries, list[str]]:
    """Return the series to be used and the parameters that each is used for, in its order.

    Of a parameter it is one series, of the lowest rank that has it: parameters that share one share an
    optimizer. Norms at `step` come before those at `accumulated`, and then the longest series before others.
    """
    best: dict[str, tuple[tuple[int, int], StoredSeries]] = {}
    for series, repeated in of_lowest_ranks(run):
        if series.key.stat == STAT and series.key.point in _POINTS:
            worth = _POINTS.index(series.key.point), len(series)
            for column, name in enumerate(series.key.names):
                if column not in repeated and (name not in best or worth > best[name][0]):
                    best[name] = worth, series
    found: dict[StoredSeries, list[str]] = {}
    for name, (_, series) in best.items():
        found.setdefault(series, []).append(name)
    return found


def skipped_steps(run: Run) -> frozenset[int]:
    return frozenset(one.event.step for one in events_after(run, {}) if one.event.kind in _SKIPS)


def behaviours(series: StoredSeries, names: Sequence[str]) -> list[Behaviour]:
    """Return how parameters behave, by a sample of the steps; those without a gradient in it are left out."""
    rows = max(_LEAST_ROWS, _SAMPLED // len(names))
    columns = [(series.columns[name], array("f")) for name in names]
    for row in series.sample(max(1, len(series) // rows)):
        for column, values in columns:
            if column not in row.absent and math.isfinite(value := row.values[column]):
                values.append(value)
    sampled = zip(names, columns, strict=True)
    return [_behaviour(name, values) for name, (_, values) in sampled if len(values) > 1]


def _behaviour(name: str, values: Sequence[float]) -> Behaviour:
    logarithms = [math.log(max(value, _TINY)) for value in values]
    tenths, middle = quantiles(logarithms, n=10), len(values) // 2
    drift = median(logarithms[middle:]) - median(logarithms[:middle])
    # A spread of some hundredths is one of a constant norm, whatever its exact size.
    return Behaviour(name, (tenths[4], math.log(tenths[8] - tenths[0] + 0.05), drift))


def group_norms(
    series: StoredSeries, groups: Iterable[Sequence[str]], skipped: Container[int]
) -> list[GroupNorms]:
    """Return the norm over each group in each step in which one of its parameters has a gradient."""
    found = []
    for names in groups:
        columns = [series.columns[name] for name in names]
        found.append((columns, _values_of(columns), GroupNorms()))
    gaps, before = Counter[int](), -1
    for row in series.rows():
        if before >= 0:
            gaps[row.step - before] += 1
        before = row.step
        values, absent = row.values.tolist(), row.absent
        for columns, values_of, group in found:
            if row.step in skipped:
                group.skipped += 1
            elif not absent:
                group.add(row.step, math.hypot(*values_of(values)))
            elif there := [values[column] for column in columns if column not in absent]:
                group.add(row.step, math.hypot(*there))
    every = _every(gaps)
    for _, _, group in found:
        group.every = every
    return [group for _, _, group in found]


def _every(gaps: Counter[int]) -> int:
    """Return the usual gap between recorded steps, 1 where hardly any are left out."""
    wide = Counter({gap: number for gap, number in gaps.items() if gap > 1})
    return wide.most_common(1)[0][0] if wide.total() > _SPARSE * gaps.total() else 1


def _values_of(columns: Sequence[int]) -> Callable[[Sequence[float]], Sequence[float]]:
    first, *more = columns
    # Of a single place `itemgetter` returns the value itself.
    return itemgetter(*columns) if more else itemgetter(slice(first, first + 1))
