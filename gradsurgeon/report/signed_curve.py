"""A number that has a sign, over the calls of a run: its mean in a few of them, and when it was below 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from statistics import fmean, median

CELLS = 32
# Of fewer calls a mean says more of their batches than of the losses; so many standard errors from 0 it is no noise.
_LEAST_CALLS, _ERRORS = 8, 3.5
# The standard deviation of normal numbers, as a multiple of the median distance of two of them.
_OF_MEDIAN = 1.0483

# Steps and values, oldest first; a step may have several.
Curve = Sequence[tuple[int, float]]


def by_step(curve: Curve) -> Curve:
    """Return the mean of each step: there may be several calls in one."""
    steps = groupby(curve, key=itemgetter(0))
    return [(step, fmean([value for _, value in calls])) for step, calls in steps]


def means_of(curve: Curve, most: int) -> list[tuple[int, float]]:
    """Return at most so many points of a curve, each the first step and the mean of a few calls."""
    windows = _windows(curve, most)
    return [(window[0][0], fmean([value for _, value in window])) for window in windows]


def _windows(curve: Curve, most: int) -> Iterator[Curve]:
    cells = min(most, len(curve))
    edges = [cell * len(curve) // cells for cell in range(cells + 1)] if cells else []
    return (curve[start:stop] for start, stop in pairwise(edges))


def tells_of_turns(curve: Curve) -> bool:
    """Tell whether there are enough calls for a change in the course of them to be seen."""
    return len(curve) >= 2 * _LEAST_CALLS


def runs_below(curve: Curve) -> list[tuple[bool, int]]:
    """Return in turn whether a cosine was below 0 beyond noise, with the first step from which on it was so."""
    windows = list(_windows(curve, min(CELLS, max(1, len(curve) // _LEAST_CALLS))))
    means = [fmean([value for _, value in window]) for window in windows]
    noise = _ERRORS * _noise([value for _, value in curve])
    sides = [
        mean < 0 if abs(mean) > noise / math.sqrt(len(window)) else None
        for window, mean in zip(windows, means, strict=True)
    ]
    if not any(side is not None for side in sides):
        # All calls together may tell what no few of them do.
        whole = fmean([value for _, value in curve]) if curve else 0.0
        decided = bool(curve) and abs(whole) > noise / math.sqrt(len(curve))
        return [(whole < 0, curve[0][0])] if decided else []
    # Where noise hides the side, a turn has begun already if the mean is where it ends.
    for place in reversed(range(len(sides) - 1)):
        if sides[place] is None and sides[place + 1] == (means[place] < 0):
            sides[place] = sides[place + 1]
    side = next(side for side in sides if side is not None)
    runs = [(side, curve[0][0])]
    for before, window, one in zip(windows, windows[1:], sides[1:], strict=False):
        if one is not None and one is not runs[-1][0]:
            runs.append((one, _turn([*before, *window], below=one)))
    return runs


def _turn(curve: Curve, *, below: bool) -> int:
    """Return the step from which on the values have another sign: up to it their sum has gone farthest the other way."""
    sums = [total if below else -total for total in accumulate(value for _, value in curve)]
    place = sums.index(max(sums)) + 1
    return curve[min(place, len(curve) - 1)][0]


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation from call to call, to which neither a trend nor a single jump adds."""
    steps = [abs(after - before) for before, after in pairwise(values)]
    return _OF_MEDIAN * median(steps) if steps else 0.0
