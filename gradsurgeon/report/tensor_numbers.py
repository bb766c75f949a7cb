"""Numbers of many tensors at once: medians, growth, noise and spikes of their norms. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gradsurgeon.report.sheets import Flags, Sheet
from gradsurgeon.report.spikes import Floats, Ints, largest_spikes

# An explosion grows so many times, to norms that no usual training has.
GROWTH, LARGE = 1e3, 1e2
_ENDS = 8  # steps at each end of a run that tell how far a norm grew
_LEAST_FOR_GROWTH = 4
_TURNS = 4  # so many losses that take turns are no noise
_MOST_FOR_JITTER = 2**16
_FIELDS = ("largest", "median", "growth", "rise", "jitter")


def has_grown(rise: float, largest: float) -> bool:
    """Return whether norms have grown so far and so high that the tensor explodes."""
    return rise >= GROWTH and largest >= LARGE


def numbers_of(sheet: Sheet, lines: slice) -> dict[str, Any]:
    """Return what is computed of many tensors at once: a number for each, NaN where there is nothing to compute."""
    tops, sample = sheet.tops[lines], sheet.sample[lines]
    found: dict[str, Any] = {field: np.full(len(tops), np.nan) for field in _FIELDS}
    found["spike"] = [None] * len(tops)
    # The last norms before a non-finite one may have grown within a step or two.
    ends = np.where(sheet.there[lines], np.arange(tops.shape[1]), -1).argmax(axis=1)
    broken: Flags = np.asarray(sheet.bad[lines][np.arange(len(tops)), ends] > 0)
    for rows, columns, norms in _alike(tops, ~np.isnan(tops)):
        found["largest"][rows] = norms.max(axis=1)
        for row, spike in zip(rows, largest_spikes(norms), strict=True):
            found["spike"][row] = spike and (int(columns[spike[0]]), spike[1])
    for rows, _, norms in _alike(tops, tops > 0):
        found["growth"][rows], found["rise"][rows] = _growth(norms, broken[rows])
    for rows, _, norms in _alike(sample, ~np.isnan(sample)):
        found["median"][rows] = np.median(norms, axis=1)
    for rows, _, norms in _alike(sample, sample > 0):
        found["jitter"][rows] = _jitter(np.log(norms[:, -_MOST_FOR_JITTER:]))
    return found


def _alike(norms: Floats, kept: Flags) -> Iterator[tuple[list[int], Ints, Floats]]:
    """Yield rows that keep the same columns, these columns, and their norms, none of which is missing."""
    groups: dict[bytes, list[int]] = {}
    for row, mask in enumerate(kept):
        groups.setdefault(mask.tobytes(), []).append(row)
    for rows in groups.values():
        columns = np.flatnonzero(kept[rows[0]])
        if len(columns):
            yield rows, columns, norms[rows][:, columns].astype(float)


def _growth(norms: Floats, broken: Flags) -> tuple[Floats, Floats]:
    """Return `growth` and `rise` of tracks; of few norms `rise` alone, up to the last one.

    A single high norm is no growth, unless a non-finite one follows, or it is the last of a module that is seldom called.
    """
    number = norms.shape[1]
    few = max(1, min(3, number // 4))
    begin = np.median(norms[:, : max(1, min(_ENDS, number // 4))], axis=1)
    lasting = sliding_window_view(norms, few, axis=1).min(axis=2)
    end = np.where(broken, norms[:, -few:].max(axis=1), lasting[:, -1])
    growth = end / begin if number >= _LEAST_FOR_GROWTH else np.full(len(norms), np.nan)
    return growth, (np.maximum(end, lasting.max(axis=1)) if few > 1 else end) / begin


def _jitter(logs: Floats) -> Floats:
    """Return the median distance of logarithms of norms a few steps apart, the least of several distances in time.

    Losses that take turns have a different norm in each step, and the same again a few steps later.
    """
    found = np.full(len(logs), np.nan)
    for lag in range(1, min(_TURNS, logs.shape[1] - 1) + 1):
        found = np.fmin(found, np.median(np.abs(logs[:, lag:] - logs[:, :-lag]), axis=1))
    return found
