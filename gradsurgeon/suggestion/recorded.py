"""How the parameters of a run behave, and the norms of groups of them."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run, of_lowest_ranks
from gradsurgeon.store.tables import arrays, blocks

_POINTS = ("accumulated", "step")  # at `step` a norm is that of the final gradient: better
_SKIPS = ("skipped-step", "scaler-skip")
# The sample has so many values, and at least so many rows.
_SAMPLED, _LEAST_ROWS = 2**22, 64
_TINY = 1e-38  # below it a float32 loses its digits
_LARGEST = 3.4e38  # above it a norm is infinite to the rule, and as a float32
# A series may lack this share of its steps, for example because a scaler skipped them, and still count as complete.
_SPARSE = 0.05
# A bias with so much less gradient than the rest of its module has none by mathematics: it is rounding.
_NOISE = math.log(1e5)

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
# Logarithms of the median, of the spread, and of the median of the second half of the steps divided by the median
# of the first half.
Behaviour = tuple[float, float, float]


class GroupNorms(NamedTuple):
    """The finite norms over a group of parameters, with their steps."""

    norms: Floats
    steps: Any
    nonfinite: int
    skipped: int
    every: int


def sources(run: Run) -> dict[StoredSeries, list[str]]:
    """Return the series to use, first those at `step`, then the longest, each with its parameters."""
    best: dict[str, tuple[tuple[int, int], StoredSeries]] = {}
    for series, repeated in of_lowest_ranks(run):
        if series.key.stat == "l2" and series.key.point in _POINTS:
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


def behaviours(series: StoredSeries, names: Sequence[str]) -> dict[str, Behaviour]:
    """Return how parameters behave, by a sample of the steps. A parameter without a gradient in it is left out."""
    every = max(1, len(series) // max(_LEAST_ROWS, _SAMPLED // len(names)))
    # A look-up per row jumps from one to the next: the rows between need not be read.
    rows = (series.stored(number, number + 1) for number in range(0, len(series), every))
    _, values, present = arrays([*chain.from_iterable(rows)], len(series.key.names))
    found = {}
    for name in names:
        column = series.columns[name]
        norms = values[present[:, column] & np.isfinite(values[:, column]), column]
        if len(norms) > 1:
            found[name] = _behaviour(np.log(np.maximum(norms, _TINY), dtype=float))
    return found


def rounding_noise(found: Mapping[str, Behaviour]) -> list[str]:
    """Return biases whose gradient is zero by mathematics, such as key biases before a softmax."""
    largest: dict[str, float] = {}
    for name, (median, *_) in found.items():
        module = name.rpartition(".")[0]
        largest[module] = max(median, largest.get(module, median))
    biases = [name for name in found if "bias" in name.rpartition(".")[2]]
    return [name for name in biases if found[name][0] + _NOISE < largest[name.rpartition(".")[0]]]


def _behaviour(logarithms: Floats) -> Behaviour:
    middle = len(logarithms) // 2
    low, median, high = np.quantile(logarithms, (0.1, 0.5, 0.9))
    drift = np.median(logarithms[middle:]) - np.median(logarithms[:middle])
    # A spread of some hundredths is one of a constant norm, whatever its exact size.
    return float(median), float(np.log(high - low + 0.05)), float(drift)


def group_norms(
    series: StoredSeries, groups: Sequence[Sequence[str]], skipped: Collection[int]
) -> Iterator[GroupNorms]:
    """Yield the norms over each group, in the steps in which a parameter of the group has a gradient."""
    columns = [[series.columns[name] for name in names] for names in groups]
    steps_of, norms_of = list[Any](), list[Any]()
    for steps, values, present in blocks(series):
        squares = np.where(present, values, 0).astype(float) ** 2
        norms = np.sqrt([squares[:, chosen].sum(axis=1) for chosen in columns])
        there = np.array([present[:, chosen].any(axis=1) for chosen in columns])
        norms = np.where(norms < _LARGEST, norms, np.inf)
        steps_of.append(steps)
        # NaN is no norm at all.
        norms_of.append(np.where(there, norms, np.nan).astype(np.float32))
    steps, norms = np.concatenate(steps_of), np.concatenate(norms_of, axis=-1)
    took_place = ~np.isin(steps, list(skipped))
    gaps = np.diff(steps)
    wide = gaps[gaps > 1]
    every = int(np.median(wide)) if len(wide) > _SPARSE * len(gaps) else 1
    for group in norms:
        finite = np.isfinite(group) & took_place
        nonfinite = int((np.isinf(group) & took_place).sum())
        yield GroupNorms(group[finite], steps[finite], nonfinite, int((~took_place).sum()), every)
