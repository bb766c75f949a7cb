"""Norms that stand out from the steps before them, and norms that change their level. Needs numpy."""

from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Norms of one training differ from step to step by less than this.
TIMES = 10.0
# A norm is compared with so many steps before it, and with no fewer than the second number.
PAST, LEAST_PAST = 64, 16
# A spike is over so many steps later, or it is a new level.
_AFTER, _FALLS = 8, 3.0
# Heavy-tailed norms, as of reinforcement learning, stand out from their own spread only, or so far above their past.
_SPREADS, _FAR = 6.0, 30.0
# With too short a past a norm is a spike if it is so far above all others.
_FAR_FROM_ALL = 100.0
# The standard deviation of normal numbers, as a multiple of their median deviation.
_NORMAL = 1.4826
_AT_ONCE = 64

# A level is the median of so many steps; a new one is at least so many times another, and comes at once.
_LEVEL, _SIDE = 32, 8
_LEAST_CHANGE, _LEVEL_SPREADS, _AT_ONCE_SHARE = 2.0, 6.0, 0.7


class Spike(NamedTuple):
    """A norm that stands out, and how many times the median of the steps before it."""

    step: int
    value: float
    times: float


def largest_spikes(norms: Floats) -> list[tuple[int, float] | None]:
    """Return for each row the place of the norm that stands out most, and how many times its past it is.

    A norm is a spike if it exceeds the median of the `PAST` norms before it by `TIMES`, and by six times their
    spread around their trend on a log scale, if none of them was a third as high (or none a 30th, whatever their
    spread), and if the next few are lower again. With too short a past it is a spike if it is a hundred times
    all others. `norms` has the shape ``[tensors, n]`` and is finite.
    """
    found: list[tuple[int, float] | None] = [None] * len(norms)
    # At the end of so short a run nobody knows whether it falls.
    last = min(LEAST_PAST, norms.shape[1] - _AFTER)
    if last <= 1:
        return found
    for row in np.flatnonzero(norms.argmax(axis=1) < last).tolist():
        found[row] = _early(norms[row])
    with np.errstate(all="ignore"):
        bounds = np.where(norms > 0, norms / _extreme_before(norms, np.minimum, PAST), 0.0)
    # Most norms are no higher than those right before them, and need not be compared further.
    bounds[norms <= _FALLS * _extreme_before(norms, np.maximum, _AFTER)] = 0.0
    bounds[:, :LEAST_PAST] = 0.0
    for row in np.flatnonzero((bounds > TIMES).any(axis=1)).tolist():
        both = filter(None, (found[row], _largest(norms[row], bounds[row])))
        found[row] = max(both, key=itemgetter(1), default=None)
    return found


def _early(norms: Floats) -> tuple[int, float] | None:
    place = int(norms.argmax())
    usual = float(np.median(norms[:place])) if place else 0.0
    is_far = usual > 0 and norms[place] > _FAR_FROM_ALL * np.delete(norms, place).max()
    return (place, float(norms[place]) / usual) if is_far else None


def _largest(norms: Floats, bounds: Floats) -> tuple[int, float] | None:
    best: tuple[int, float] | None = None
    order = np.argsort(-bounds, kind="stable")
    order = order[bounds[order] > TIMES]
    for start in range(0, len(order), _AT_ONCE):
        places = order[start : start + _AT_ONCE]
        # The least of the past is no larger than its median, so that a bound only falls.
        if best is not None and bounds[places[0]] <= best[1]:
            break
        times = _times(norms, places)
        at = int(times.argmax())
        if times[at] > (TIMES if best is None else best[1]):
            best = int(places[at]), float(times[at])
    return best


def _extreme_before(norms: Floats, extreme: np.ufunc, reach: int) -> Floats:
    """Return the least or the largest of so many norms before each norm; ``reach`` is a power of 2."""
    found, done = np.concatenate([norms[:, :1], norms[:, :-1]], axis=1), 1
    while done < reach:
        found[:, done:] = extreme(found[:, done:], found[:, :-done].copy())
        done *= 2
    return found


def _times(values: Floats, places: Ints) -> Floats:
    """Return each value as a multiple of the median before it, 0 for those that are no spikes."""
    padded = np.concatenate([np.full(PAST, np.nan), values, np.full(_AFTER, np.nan)])
    past = padded[places[:, None] + np.arange(PAST)]
    after = padded[places[:, None] + PAST + 1 + np.arange(_AFTER)]
    with np.errstate(all="ignore"):
        usual = _row_median(past)
        logs = np.where(past > 0, np.log(np.where(past > 0, past, 1.0)), np.nan)
        trend = _trend(logs)
        spread = _NORMAL * _row_median(np.abs(logs - trend[:, :-1]))
        peak = values[places]
        times = np.where(usual > 0, peak / usual, 0.0)
        above = np.log(peak) - np.fmax(np.log(usual), trend[:, -1])
        # Heavy tails, and peaks that come again and again, have been as high before.
        highest = np.fmax.reduce(logs - trend[:, :-1], axis=1)
        stands_out = above > np.fmax(_SPREADS * spread, highest + np.log(_FALLS))
        stands_out |= above > highest + np.log(_FAR)
        # What comes after it to stay is a new level; at the end the steps right before it decide.
        few = np.isfinite(after).sum(axis=1) < _FALLS
        falls = np.where(
            few,
            peak > TIMES * np.fmax.reduce(past[:, -_AFTER:], axis=1),
            peak > _FALLS * _row_median(after),
        )
    return np.where(stands_out & falls, times, 0.0)


def _trend(logs: Floats) -> Floats:
    """Return a straight line through each row and one step on: a norm that only falls or grows has no spread."""
    halves = logs[:, : PAST // 2], logs[:, PAST // 2 :]
    known = np.all([np.isfinite(half).any(axis=1) for half in halves], axis=0)
    early, late = map(_row_median, halves)
    slope = np.where(known, (late - early) / (PAST // 2), 0.0)
    line = slope[:, None] * np.arange(PAST + 1)
    return np.asarray(line + _row_median(logs - line[:, :-1])[:, None])


def _row_median(rows: Floats) -> Floats:
    """Return the median of each row without NaN, 0 of a row that has nothing else."""
    ordered = np.sort(rows, axis=1)  # NaN last
    number = np.isfinite(rows).sum(axis=1)
    row = np.arange(len(rows))
    middle = (
        ordered[row, np.maximum(number - 1, 0) // 2]
        + ordered[row, np.minimum(number // 2, rows.shape[1] - 1)]
    ) / 2
    return np.where(number > 0, middle, 0.0)


def change_of_level(steps: Ints, norms: Floats) -> tuple[int, float, float] | None:
    """Return the step at which positive norms change their level most, at once and to stay, and both levels.

    None if the norms drift or only vary.
    """
    logs = np.log(np.asarray(norms, float))
    # The beginning of a training falls fast, and is no change of a level.
    if len(logs) < 3 * _LEVEL:
        return None
    windows = sliding_window_view(logs, _LEVEL)
    levels = np.median(windows, axis=1)
    spreads = np.median(np.abs(windows - levels[:, None]), axis=1)
    near = np.median(sliding_window_view(logs, _SIDE), axis=1)
    places = np.arange(2 * _LEVEL, len(logs) - _LEVEL + 1)
    far = levels[places] - levels[places - _LEVEL]
    close = near[places] - near[places - _SIDE]
    noise = _NORMAL * np.maximum(spreads[places], spreads[places - _LEVEL]) + 0.01
    is_new = (np.abs(far) > np.log(_LEAST_CHANGE)) & (np.abs(far) > _LEVEL_SPREADS * noise)
    is_new &= close * np.sign(far) > _AT_ONCE_SHARE * np.abs(far)
    if not is_new.any():
        return None
    at = int(np.argmax(np.where(is_new, np.abs(far) / noise, 0.0)))
    place = int(places[at])
    before, after = np.exp(levels[place - _LEVEL]), np.exp(levels[place])
    return int(steps[place]), float(before), float(after)
