"""Norms that stand out from the steps before them. Needs numpy."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

# Norms of one training differ from step to step by less than this.
TIMES = 10.0
# A norm is compared with so many steps before it, and with no fewer than the second number.
PAST = 64
LEAST_PAST = 16
# A spike is over so many steps later, or it is a new level.
_AFTER = 8
_FALLS = 3.0
# Heavy-tailed norms, as of reinforcement learning, stand out from their own spread only.
_SPREADS = 6.0
# The standard deviation of normal numbers, as a multiple of their median deviation.
_NORMAL = 1.4826


class Spike(NamedTuple):
    """A norm that stands out, and how many times the median of the steps before it."""

    step: int
    value: float
    times: float


def largest_spike(steps: Ints, norms: Floats) -> Spike | None:
    """Return the norm that stands out most.

    A norm is a spike if it exceeds the median of the `PAST` norms before it by `TIMES`, and by six times their
    spread on a log scale, if none of them was a third as high, and if the next few are lower again. The first
    `LEAST_PAST` norms are never spikes. All norms are finite.
    """
    if len(norms) <= LEAST_PAST:
        return None
    # Most norms are no higher than the norms right before them, and need not be compared further.
    recent = of_windows(np.maximum, norms[:-1], _AFTER)
    places = _AFTER + np.flatnonzero(norms[_AFTER:] > _FALLS * recent)
    places = places[places >= LEAST_PAST]
    if not len(places):
        return None
    times = _times(norms, places)
    best = int(times.argmax())
    if times[best] <= TIMES:
        return None
    place = places[best]
    return Spike(int(steps[place]), float(norms[place]), float(times[best]))


def raised_level(steps: Ints, norms: Floats, usual: float) -> tuple[int, int, float] | None:
    """Return the first and the last step of a level that did not stay, and its height as a multiple of the usual norm.

    A level is the median of successive norms. That of the begin or of the end of a training is none, and none is
    nearly as high as the levels before it or after it.
    """
    # Nearly always too few norms are so high.
    if not usual or np.count_nonzero(norms > TIMES * usual) < LEAST_PAST:
        return None
    blocks = len(norms) // LEAST_PAST
    # The newest norms decide whether a level has stayed.
    length = blocks * LEAST_PAST
    levels = np.median(norms[-length:].reshape(blocks, LEAST_PAST), axis=1)
    raised = np.flatnonzero(levels > TIMES * usual)
    if not len(raised):
        return None
    first = raised[0]
    last = raised[-1]
    for side in (levels[:first], levels[last + 1 :]):
        if not len(side) or np.median(side) * _FALLS > TIMES * usual:
            return None
    newest = steps[-length:]
    begin = newest[first * LEAST_PAST]
    end = newest[(last + 1) * LEAST_PAST - 1]
    return int(begin), int(end), float(levels.max() / usual)


def of_windows(extreme: np.ufunc, values: Floats, width: int) -> Floats:
    """Return the largest, or the least, of each so many successive values."""
    length = len(values) - width + 1
    result = values[:length]
    for start in range(1, width):
        result = extreme(result, values[start : start + length])
    return result


def _times(values: Floats, places: Ints) -> Floats:
    """Return each value as a multiple of the median before it, 0 for values that are no spikes."""
    padded = np.concatenate([np.full(PAST, np.nan), values, np.full(_AFTER, np.nan)])
    begins = places[:, None]
    past = padded[begins + np.arange(PAST)]
    after = padded[begins + PAST + 1 + np.arange(_AFTER)]
    peaks = values[places]
    usual = np.nanmedian(past, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(past > 0, np.log(past), np.nan)
        above = np.log(peaks / usual)
        times = np.where(usual > 0, peaks / usual, 0.0)
        apart = np.abs(logs - np.log(usual)[:, None])
    spread = _NORMAL * _row_medians(apart)
    is_far_above = above > _SPREADS * spread
    is_new = peaks > _FALLS * np.nanmax(past, axis=1)
    # At the end of a run the steps right before a peak decide.
    is_at_end = np.isfinite(after).sum(axis=1) < _FALLS
    recent = np.nanmax(past[:, -_AFTER:], axis=1)
    falls = peaks > _FALLS * _row_medians(after)
    falls[is_at_end] = (peaks > TIMES * recent)[is_at_end]
    times[~(is_far_above & is_new & falls)] = 0.0
    return times


def _row_medians(rows: Floats) -> Floats:
    """Return the median of each row without NaN, 0 of a row that has nothing else."""
    is_known = np.asarray(np.isfinite(rows).any(axis=1))
    filled = np.where(is_known[:, None], rows, 0.0)
    return np.asarray(np.nanmedian(filled, axis=1))
