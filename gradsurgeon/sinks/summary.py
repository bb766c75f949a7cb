"""Few numbers from a row of measurements, however many tensors it has. No torch."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from heapq import nlargest
from statistics import fmean, median
from typing import NamedTuple

from gradsurgeon.statistics import STATISTICS
from gradsurgeon.store.memory import Key

TOP = 10
# Up to so many tensors each have a curve: losses, or the layers of a small model.
_FEW = 10
# Bins of the histogram of decimal logarithms, in a decade.
_PER_DECADE = 4
NORM = "l2"


class Summary(NamedTuple):
    """What a sink gets of one row.

    Attributes:
        step: number of the update.
        scalars: numbers by name.
        rule: the rule that has measured the row.
        histogram: edges, and the number of decimal logarithms of norms between each edge and the next; ``None``
            if there are no norms.
        top: the tensors with the largest norms, the largest first.
    """

    step: int
    scalars: dict[str, float]
    rule: str = ""
    histogram: tuple[list[float], list[int]] | None = None
    top: Sequence[tuple[str, float]] = ()


class Measured(NamedTuple):
    """One row as it is stored."""

    key: Key
    step: int
    values: bytes
    absent: frozenset[int]
    # A later row of the same step may replace it.
    replace: bool = False

    def weight(self) -> float:
        """Return the rank of the row among several steps of its series: the worst step, or else the newest, is the largest."""
        total, stat = math.hypot(*array("f", self.values)), self.key.stat
        if stat not in STATISTICS or (math.isfinite(total) and stat != NORM):
            return float(self.step)
        return total if math.isfinite(total) else math.inf


class Parts:
    """Names for the series of one rule and statistic: each of several optimizers has a series of its own."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self._tensors: list[set[str]] = []

    def named(self, row: Measured) -> Measured:
        """Return a row of the first series as it is, and a row of another one under a name of its own."""
        names = row.key.names
        if names not in self._numbers:
            # An optimizer that gets more parameters begins another series, which takes the place of the older one.
            new, known = set(names), self._tensors
            number = next((n for n, one in enumerate(known) if not new.isdisjoint(one)), len(known))
            known[number : number + 1] = [new]
            self._numbers[names] = number
        part = self._numbers[names] + 1
        rule = f"{row.key.rule}/part-{part}"
        return row if part == 1 else row._replace(key=row.key._replace(rule=rule))


def summary(row: Measured, chosen: Collection[str] = ()) -> Summary | None:
    """Return what a sink gets of a row, ``None`` if nothing was measured. ``chosen`` tensors have a curve each."""
    rule, stat, _, names = row.key
    numbers = zip(names, array("f", row.values), strict=True)
    pairs = [pair for column, pair in enumerate(numbers) if column not in row.absent]
    of_gradients = stat in STATISTICS and not STATISTICS[stat].of_update
    if not of_gradients:
        # A number between losses is NaN if a loss did not reach the parameters. In a number of one gradient NaN is news.
        pairs = [pair for pair in pairs if not math.isnan(pair[1])]
    if not pairs:
        return None
    finite = [value for _, value in pairs if math.isfinite(value)]
    of_norms, few = stat == NORM and len(names) > 1, len(names) <= _FEW
    each = few and not of_norms
    scalars = {f"{rule}/{name}/{stat}": value for name, value in pairs if each or name in chosen}
    if of_norms:
        # NaN is equal to nothing, and comes first.
        top = nlargest(TOP, pairs, key=lambda one: math.inf if math.isnan(one[1]) else one[1])
        scalars |= {
            f"{rule}/total": math.hypot(*(value for _, value in pairs)),
            f"{rule}/not finite": float(len(pairs) - len(finite)),
            **{f"{rule}/top/{place:02}": value for place, (_, value) in enumerate(top, 1)},
        }
        if finite:
            scalars[f"{rule}/median"] = median(finite)
        return Summary(row.step, scalars, rule, _histogram(finite), top)
    if of_gradients and not few:
        scalars[f"{rule}/{stat}/not finite"] = float(len(pairs) - len(finite))
    if finite and (not few if of_gradients else len(names) > 1):
        if not of_gradients:
            scalars[f"{rule}/{stat}/mean"] = fmean(finite)
        scalars |= {f"{rule}/{stat}/largest": max(finite), f"{rule}/{stat}/least": min(finite)}
    return Summary(row.step, scalars)


def _histogram(norms: Sequence[float]) -> tuple[list[float], list[int]] | None:
    bins = Counter(math.floor(math.log10(norm) * _PER_DECADE) for norm in norms if norm > 0)
    if not bins:
        return None
    places = range(min(bins), max(bins) + 1)
    edges = [place / _PER_DECADE for place in (*places, places.stop)]
    return edges, [bins[place] for place in places]
