"""How each parameter of a run behaves, and the norms of groups of parameters.

A series is read twice, block by block: a sample of it shows how parameters behave, all of it gives the norms of
the groups. Memory holds four bytes per step and group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run, of_lowest_ranks
from gradsurgeon.store.tables import arrays

STAT = "l2"
_POINTS = ("accumulated", "step")  # at `step` a norm is that of the final gradient: better
_SKIPS = frozenset({"skipped-step", "scaler-skip"})
# The sample has so many values, and at least so many rows.
_SAMPLED, _LEAST_ROWS = 2**22, 64
_TINY = 1e-38  # below it a float32 loses its digits
_LARGEST = 3.4e38  # above it a norm is infinite to the rule, and as a float32
# A series may lack this share of its steps, for example because a scaler skipped them, and still count as complete.
_SPARSE = 0.05

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Behaviour(NamedTuple):
    """How large the norms of one parameter are, how far they spread, and where they go.

    Attributes:
        name: name of the parameter.
        measures: logarithms of the median, of the spread, and of the median of the second half of the steps
            divided by the median of the first half.
    """

    name: str
    measures: tuple[float, float, float]


@dataclass(slots=True)
class GroupNorms:
    """The norms over a group of parameters, and the number of steps that have none.

    Attributes:
        norms: the finite norms, oldest first.
        first: step of the first of them.
        last: step of the last of them.
        nonfinite: number of steps with a non-finite norm.
        skipped: number of steps whose update did not take place.
        every: one step in so many was recorded.
    """

    norms: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    first: int = 0
    last: int = 0
    nonfinite: int = 0
    skipped: int = 0
    every: int = 1


def sources(run: Run) -> dict[StoredSeries, list[str]]:
    """Return the series to use, each with the parameters to use it for.

    A parameter has one series, of the lowest rank that recorded it: parameters that share a series share an
    optimizer. Norms at `step` are preferred to norms at `accumulated`, then longer series to shorter ones.
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
    return frozenset(event.step for event in run.events if event.kind in _SKIPS)


def _blocks(series: StoredSeries) -> Iterator[tuple[Any, Floats, Any]]:
    """Yield steps, values, and which of the values are present."""
    return (arrays(rows, len(series.key.names)) for rows in series.batches())


def behaviours(series: StoredSeries, names: Sequence[str]) -> list[Behaviour]:
    """Return how parameters behave, by a sample of the steps. A parameter without a gradient in it is left out."""
    every = max(1, len(series) // max(_LEAST_ROWS, _SAMPLED // len(names)))
    columns, sample, read = [series.columns[name] for name in names], [], 0
    for _, values, present in _blocks(series):
        chosen = slice(-read % every, None, every)
        sample.append(np.where(present[chosen], values[chosen], np.nan)[:, columns])
        read += len(values)
    found = []
    for name, column in zip(names, np.concatenate(sample).T, strict=True):
        finite = column[np.isfinite(column)]
        if len(finite) > 1:
            found.append(_behaviour(name, finite))
    return found


def _behaviour(name: str, values: Floats) -> Behaviour:
    logarithms, middle = np.log(np.maximum(values, _TINY), dtype=float), len(values) // 2
    low, median, high = np.quantile(logarithms, (0.1, 0.5, 0.9))
    drift = np.median(logarithms[middle:]) - np.median(logarithms[:middle])
    # A spread of some hundredths is one of a constant norm, whatever its exact size.
    return Behaviour(name, (float(median), float(np.log(high - low + 0.05)), float(drift)))


def group_norms(
    series: StoredSeries, groups: Sequence[Sequence[str]], skipped: Collection[int]
) -> list[GroupNorms]:
    """Return the norm over each group in each step in which a parameter of the group has a gradient."""
    columns = [[series.columns[name] for name in names] for names in groups]
    found, parts = [GroupNorms() for _ in groups], [list[Floats]() for _ in groups]
    gaps, before = Counter[int](), np.empty(0, np.int64)
    for steps, values, present in _blocks(series):
        gaps.update(np.diff(np.concatenate([before, steps])).tolist())
        before = steps[-1:]
        took_place = ~np.isin(steps, list(skipped))
        squares = np.where(present, values, 0).astype(float) ** 2
        for group, chosen, part in zip(found, columns, parts, strict=True):
            there = present[:, chosen].any(axis=1) & took_place
            norms = np.sqrt(squares[:, chosen].sum(axis=1))
            finite = there & (norms < _LARGEST)
            if finite.any():
                group.first = group.first if part else int(steps[finite][0])
                group.last = int(steps[finite][-1])
                part.append(norms[finite].astype(np.float32))
            group.nonfinite += int((there & ~finite).sum())
            group.skipped += int((~took_place).sum())
    for group, part in zip(found, parts, strict=True):
        group.norms, group.every = np.concatenate([group.norms, *part]), _every(gaps)
        part.clear()
    return found


def _every(gaps: Counter[int]) -> int:
    """Return the usual gap between recorded steps, 1 if hardly any step is left out."""
    wide = Counter({gap: number for gap, number in gaps.items() if gap > 1})
    return wide.most_common(1)[0][0] if wide.total() > _SPARSE * gaps.total() else 1
