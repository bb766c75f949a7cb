"""Which step of a history stands out from the steps around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

# Norms of one training differ from step to step by less than this, in its first steps above all.
_TIMES = 10.0
# Of fewer steps nobody can say what is usual.
_LEAST = 20
# So many steps before and after are what a step is compared with: the norm of a whole training falls
# by orders of magnitude, and every step of its beginning is far above its median.
_NEAR = 8


class Spike(NamedTuple):
    """A norm that stands out, and how many times the norms around it; infinite where those are 0."""

    step: int
    value: float
    times: float


def largest_spike(pairs: Sequence[tuple[int, float]]) -> Spike | None:
    """Return which of steps and norms stands out most, ``None`` where none does."""
    finite = [pair for pair in pairs if math.isfinite(pair[1])]
    values = [value for _, value in finite]
    spike: Spike | None = None
    largest = _TIMES
    # The first norm has nothing to stand out from: as often as not it is the beginning of a fall.
    for start in range(1, len(values) if len(values) >= _LEAST else 0, _NEAR):
        # What does not stand out from the least of its surroundings need not be compared further.
        lowest = min(values[max(0, start - _NEAR) : start + 2 * _NEAR])
        for index in range(start, min(start + _NEAR, len(values))):
            if values[index] > largest * lowest and (times := _times(values, index)) > largest:
                largest = times
                spike = Spike(*finite[index], times)
        if math.isinf(largest):
            break
    return spike


def _times(values: Sequence[float], index: int) -> float:
    """Return a norm as a multiple of the usual norm of the steps around it."""
    before = values[max(0, index - _NEAR) : index]
    after = values[index + 1 : index + 1 + _NEAR]
    # What comes after it to stay is no spike but a new level; at the end that cannot be known.
    usual = max(median(before), median(after)) if after else max(before)
    if usual > 0:
        return values[index] / usual
    return math.inf if values[index] > 0 else 0.0
