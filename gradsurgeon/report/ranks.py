"""Where replicas differ: the first step and tensor at which two ranks recorded other norms. Needs numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.report.history import MOST_VALUES, POINTS
from gradsurgeon.report.sheets import blocks
from gradsurgeon.report.rules_and_events import GRADIENT, STAT
from gradsurgeon.store.layout import CHUNK, Summary

if TYPE_CHECKING:
    from gradsurgeon.store.rank_file import StoredSeries
    from gradsurgeon.store.run import Run

# What DDP has reduced is the same to the last bit; other set-ups reduce in another order on each rank.
_TOLERANCE = 1e-3
_REDUCED = POINTS[:2]


def ranks_that_differ(run: Run, kinds: Mapping[str, str]) -> str:
    """Return a sentence on the first step and parameter at which ranks differ, empty if none do.

    Args:
        run: with its files open.
        kinds: what each rule measures.
    """
    lowest: dict[tuple[object, ...], StoredSeries] = {}
    first: tuple[int, str, list[tuple[int, float]]] | None = None
    for series in run:
        key = series.key
        if key.stat != STAT or key.point not in _REDUCED or kinds.get(key.rule) != GRADIENT:
            continue
        other = lowest.setdefault(tuple(key), series)
        if other is series:
            continue
        found = _first_difference(other, series)
        if found is not None and (first is None or found[0] < first[0]):
            step, column, values = found
            pair = [(other.rank, values[0]), (series.rank, values[1])]
            first = step, key.names[column], pair
    if first is None:
        return ""
    step, name, norms = first
    told = " and ".join(f"{norm:.3g} on rank {rank}" for rank, norm in norms)
    return f"ranks differ from step {step} on: the norm of {printable(name)} is {told}"


def _first_difference(
    one: StoredSeries, other: StoredSeries
) -> tuple[int, int, tuple[float, float]] | None:
    start = 0
    if len(one) * len(one.key.names) > MOST_VALUES:
        pairs = enumerate(zip(one.summaries(), other.summaries(), strict=False))
        start = next((number for number, (a, b) in pairs if not _alike(a, b)), -1)
        if start < 0:
            return None
    both = zip(blocks(one, start * CHUNK), blocks(other, start * CHUNK), strict=False)
    for (steps, values, present), (steps_2, values_2, present_2) in both:
        length = min(len(steps), len(steps_2))
        if not np.array_equal(steps[:length], steps_2[:length]):
            return None  # the ranks have recorded other steps
        a, b = values[:length], values_2[:length]
        with np.errstate(all="ignore"):
            apart = ~np.isclose(a, b, rtol=_TOLERANCE, atol=0.0, equal_nan=True)
        apart &= present[:length] & present_2[:length]
        if apart.any():
            row, column = (int(place) for place in np.argwhere(apart)[0])
            return int(steps[row]), column, (float(a[row, column]), float(b[row, column]))
    return None


def _alike(one: Summary, other: Summary) -> bool:
    return np.allclose(one.maxima, other.maxima, rtol=_TOLERANCE, atol=0.0, equal_nan=True)
