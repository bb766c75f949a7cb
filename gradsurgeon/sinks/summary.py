"""What a row of measurements comes down to: few numbers, however many tensors there are. No torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from heapq import nlargest
from operator import itemgetter
from statistics import fmean, median
from typing import NamedTuple

from gradsurgeon.statistics import STATISTICS
from gradsurgeon.store.memory import Key

TOP = 10
# Of fewer tensors each is a curve: losses, or the layers of a small model.
_FEW = 10
# Bins of the histogram of decimal logarithms, in a decade.
_PER_DECADE = 4
NORM = "l2"


class Histogram(NamedTuple):
    """How many values lie between each of the edges and the next."""

    edges: list[float]
    counts: list[int]


class Summary(NamedTuple):
    """What is sent of one row.

    Attributes:
        step: number of the update.
        scalars: numbers by name.
        rule: that has measured it.
        histogram: of the decimal logarithms of the norms, ``None`` where there are none.
        top: the tensors with the largest norms, the largest first.
    """

    step: int
    scalars: dict[str, float]
    rule: str = ""
    histogram: Histogram | None = None
    top: tuple[tuple[str, float], ...] = ()


class Measured(NamedTuple):
    """One row as it is stored."""

    key: Key
    step: int
    values: bytes
    absent: frozenset[int]
    # Another row of the same step may stand in its place.
    replace: bool = False

    def pairs(self) -> list[tuple[str, float]]:
        values = array("f", self.values)
        pairs = zip(self.key.names, values, strict=True)
        if not self.absent:
            return list(pairs)
        return [pair for column, pair in enumerate(pairs) if column not in self.absent]


def joined(rows: Sequence[Measured]) -> Measured:
    """Return rows of one rule, statistic and step as one."""
    names = tuple(name for row in rows for name in row.key.names)
    absent, start = set[int](), 0
    for row in rows:
        absent |= {start + column for column in row.absent}
        start += len(row.key.names)
    key = rows[0].key._replace(names=names)
    values = b"".join(row.values for row in rows)
    return Measured(key, rows[0].step, values, frozenset(absent))


def weight(row: Measured) -> float:
    """Return by what the row of several steps is chosen that stands for all: the worst, or else the newest."""
    if not _is_of_gradients(row.key.stat):
        return float(row.step)
    total = math.hypot(*array("f", row.values))
    if not math.isfinite(total):
        return math.inf
    return total if row.key.stat == NORM else float(row.step)


def summary(row: Measured, chosen: Collection[str] = ()) -> Summary | None:
    """Return what is sent of a row, ``None`` if nothing was measured; ``chosen`` tensors have a curve each."""
    pairs = row.pairs()
    if not pairs:
        return None
    rule, stat, _, names = row.key
    if not _is_of_gradients(stat):
        return _between_losses(row, pairs, chosen)
    scalars = {f"{rule}/{name}/{stat}": value for name, value in pairs if name in chosen}
    if stat != NORM or len(names) == 1:
        return _of_others(row, pairs, scalars)
    finite = [value for _, value in pairs if math.isfinite(value)]
    total = math.hypot(*(value for _, value in pairs))
    top = tuple(nlargest(TOP, pairs, key=_size))
    scalars |= {
        f"{rule}/total": total,
        f"{rule}/not finite": float(len(pairs) - len(finite)),
        **{f"{rule}/top/{place:02}": value for place, (_, value) in enumerate(top, 1)},
    }
    if finite:
        scalars[f"{rule}/median"] = median(finite)
    return Summary(row.step, scalars, rule, _histogram(finite), top)


def _size(pair: tuple[str, float]) -> float:
    # What is NaN comes first, and is equal to nothing.
    return math.inf if math.isnan(pair[1]) else pair[1]


def _of_others(row: Measured, pairs: list[tuple[str, float]], scalars: dict[str, float]) -> Summary:
    rule, stat, _, names = row.key
    if len(names) <= _FEW:
        scalars |= {f"{rule}/{name}/{stat}": value for name, value in pairs}
    else:
        values = list(map(itemgetter(1), pairs))
        finite = [value for value in values if math.isfinite(value)]
        scalars[f"{rule}/{stat}/not finite"] = float(len(values) - len(finite))
        if finite:
            scalars[f"{rule}/{stat}/largest"] = max(finite)
            scalars[f"{rule}/{stat}/least"] = min(finite)
    return Summary(row.step, scalars)


def _is_of_gradients(stat: str) -> bool:
    """Tell a number of one gradient each, in which NaN is news, from those that rules on several losses record."""
    return stat in STATISTICS


def _between_losses(
    row: Measured, pairs: Sequence[tuple[str, float]], chosen: Collection[str]
) -> Summary | None:
    """Return numbers between losses; one that did not reach has none, and there may be hundreds of parts."""
    rule, stat, _, names = row.key
    known = [(name, value) for name, value in pairs if not math.isnan(value)]
    if not known:
        return None
    few = len(names) <= _FEW
    scalars = {f"{rule}/{name}/{stat}": value for name, value in known if few or name in chosen}
    if len(names) > 1:
        values = list(map(itemgetter(1), known))
        scalars |= {
            f"{rule}/{stat}/mean": fmean(values),
            f"{rule}/{stat}/largest": max(values),
            f"{rule}/{stat}/least": min(values),
        }
    return Summary(row.step, scalars)


def _histogram(norms: list[float]) -> Histogram | None:
    logs = [math.log10(norm) for norm in norms if norm > 0]
    if not logs:
        return None
    bins = [math.floor(log * _PER_DECADE) for log in logs]
    low, high = min(bins), max(bins)
    counts = [0] * (high - low + 1)
    for number in bins:
        counts[number - low] += 1
    return Histogram([edge / _PER_DECADE for edge in range(low, high + 2)], counts)
