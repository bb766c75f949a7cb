"""Where replicas differ: the first step and tensor at which two ranks recorded other norms. Needs numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.report.history import POINTS
from gradsurgeon.report.rules_and_events import GRADIENT, STAT
from gradsurgeon.report.sheets import blocks

if TYPE_CHECKING:
    from gradsurgeon.store.rank_file import StoredSeries
    from gradsurgeon.store.run import Run

# What DDP has reduced is the same to the last bit; other set-ups reduce in another order on each rank.
_TOLERANCE = 1e-3
# Ranks whose norms were alike in so many rows are replicas.
_ALIKE = 3
_REDUCED = POINTS[:2]


def ranks_that_differ(run: Run, kinds: Mapping[str, str], newest: int | None = None) -> str:
    """Return a sentence on the first step and parameter at which replicas differ, empty if none do.

    Ranks are replicas if `DistributedDataParallel` held the model, or if their norms were alike at first. Others may train
    apart, or a script averages their gradients after the norms were taken.
    """
    lowest: dict[tuple[object, ...], StoredSeries] = {}
    found = []
    for series in run:
        key = series.key
        if key.stat == STAT and key.point in _REDUCED and kinds.get(key.rule) == GRADIENT:
            other = lowest.setdefault(tuple(key), series)
            difference = None if other is series else _first_difference(other, series, newest)
            found += [difference] if difference else []
    if run.meta.get("replicas") is not True:
        found = [one for one in found if one[1] >= _ALIKE]
    return min(found)[2] if found else ""


def _first_difference(
    one: StoredSeries, other: StoredSeries, newest: int | None
) -> tuple[int, int, str] | None:
    """Return the first step at which two ranks differ, how many rows before were alike, and the sentence on it."""
    # Of two ranks that are read while they write, one may have more rows.
    start = 0 if newest is None else max(0, min(len(one), len(other)) - newest)
    both = zip(blocks(one, start), blocks(other, start), strict=False)
    alike = start
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
            step, name = int(steps[row]), printable(one.key.names[column])
            norms = f"{a[row, column]:.3g} on rank {one.rank} and {b[row, column]:.3g} on rank {other.rank}"
            told = f"ranks differ from step {step} on: the norm of {name} is {norms}"
            return step, alike + row, told
        alike += length
    return None
