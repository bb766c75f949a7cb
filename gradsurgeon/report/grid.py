"""Several tensors over common columns, as maps and curves need them. Needs numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gradsurgeon.report.history import Track
from gradsurgeon.report.sheets import Flags
from gradsurgeon.report.spikes import Floats, Ints


class Grid(NamedTuple):
    """Tensors x columns; a column stands for one step or for several, by the largest norm in them.

    Attributes:
        firsts: the first step of each column.
        lasts: the last step that was recorded in it.
        tops: the largest finite norm, NaN where there is none.
        bad: how many norms were not finite.
        there: something was measured, and the tensor had a gradient.
        measured: something was measured, be it that there was no gradient.
        each: so many steps share a column, at most.
    """

    firsts: Ints
    lasts: Ints
    tops: Floats
    bad: Ints
    there: Flags
    measured: Flags
    each: int


def grid_of(tracks: Sequence[Track], most: int) -> Grid:
    """Return some tensors over the same columns, at most so many."""
    every = np.unique(np.concatenate([np.empty(0, np.int64), *(track.steps for track in tracks)]))
    if not len(every):
        none = np.empty((len(tracks), 0))
        flags = none.astype(bool)
        return Grid(every, every, none, none.astype(np.int64), flags, flags, 1)
    width = -(-(int(every[-1]) - int(every[0]) + 1) // most)
    column = (every - every[0]) // width
    used, starts = np.unique(column, return_index=True)
    firsts, lasts = every[starts], every[np.append(starts[1:], len(every)) - 1]
    shape = len(tracks), len(used)
    tops, bad = np.full(shape, np.nan, np.float64), np.zeros(shape, np.int64)
    there, measured = np.zeros(shape, bool), np.zeros(shape, bool)
    for row, track in enumerate(tracks):
        at = np.searchsorted(used, (track.steps - every[0]) // width)
        begins = np.flatnonzero(np.diff(at, prepend=-1))
        to = at[begins]
        tops[row, to] = np.fmax.reduceat(track.tops, begins)
        bad[row, to] = np.add.reduceat(track.bad, begins)
        there[row, to] = np.logical_or.reduceat(track.there, begins)
        measured[row, to] = True
    each = int(np.diff(np.append(starts, len(every))).max())
    return Grid(firsts, lasts, tops, bad, there, measured, each)
