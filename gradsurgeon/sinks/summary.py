"""Few numbers from a row of measurements, however many tensors it has. No torch."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from statistics import median

from gradsurgeon.statistics import STATISTICS
from gradsurgeon.store.memory import Key, Measured

# Up to so many tensors each have a curve: losses, or the layers of a small model.
_FEW = 10
# Bins of the histogram of decimal logarithms, in a decade.
_PER_DECADE = 4
NORM = "l2"
# What a sink gets of one row: scalars by name, and edges and counts of a histogram.
Summary = tuple[dict[str, float], tuple[list[float], list[int]] | None]


def weight(row: Measured) -> float:
    """Return the rank of a row among several steps of its series: the worst step, or else the newest, is the largest."""
    total, stat = math.hypot(*array("f", row.values)), row.key.stat
    if stat not in STATISTICS or (math.isfinite(total) and stat != NORM):
        return float(row.step)
    return total if math.isfinite(total) else math.inf


Prefixes = dict[tuple[str, str, str], list[Key]]


def prefix_of(key: Key, known: Prefixes) -> str:
    """Return the beginning of names of numbers over several tensors: each of several optimizers has its own."""
    series = known.setdefault(key[:3], [])
    if key not in series:
        series.append(key)
    part = series.index(key) + 1
    return key.rule if part == 1 else f"{key.rule}/part-{part}"


def summary(row: Measured, prefix: str, chosen: Collection[str] = ()) -> Summary | None:
    """Return what a sink gets of a row, ``None`` if nothing was measured.

    Args:
        row: the row.
        prefix: of the names of numbers over several tensors.
        chosen: the tensors that have a curve each.
    """
    rule, stat, _, names = row.key
    numbers = zip(names, array("f", row.values), strict=True)
    pairs = [pair for column, pair in enumerate(numbers) if column not in row.absent]
    if stat not in STATISTICS or STATISTICS[stat].of_update:
        # A number between losses is NaN if a loss did not reach the parameters. In a number of one gradient NaN is news.
        pairs = [pair for pair in pairs if not math.isnan(pair[1])]
    if not pairs:
        return None
    of_norms = stat == NORM and len(names) > 1
    if not of_norms and len(names) <= _FEW:
        return {f"{rule}/{name}/{stat}": value for name, value in pairs}, None
    scalars = {f"{rule}/{name}/{stat}": value for name, value in pairs if name in chosen}
    finite = [value for _, value in pairs if math.isfinite(value)]
    found = {"not finite": float(len(pairs) - len(finite))}
    if of_norms:
        found["total"] = math.hypot(*(value for _, value in pairs))
    else:
        prefix = f"{prefix}/{stat}"
    if finite:
        found |= {"median": median(finite), "largest": max(finite), "least": min(finite)}
    scalars |= {f"{prefix}/{name}": value for name, value in found.items()}
    return scalars, _histogram(finite) if of_norms else None


def _histogram(norms: Sequence[float]) -> tuple[list[float], list[int]] | None:
    bins = Counter(math.floor(math.log10(norm) * _PER_DECADE) for norm in norms if norm > 0)
    if not bins:
        return None
    places = range(min(bins), max(bins) + 1)
    edges = [place / _PER_DECADE for place in (*places, places.stop)]
    return edges, [bins[place] for place in places]
