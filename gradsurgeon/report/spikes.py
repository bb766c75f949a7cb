"""Which step of a history stands out from the steps around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Norms of one training differ from step to step by less than this, in its first steps above all.
_TIMES = 10.0
# Of fewer steps nobody can say what is usual.
_LEAST = 20
# So many steps before and after are what a step is compared with: the norm of a whole training falls
# by orders of magnitude, and every step of its beginning is far above its median.
_NEAR = 8


@dataclass(frozen=True, slots=True)
class Spike:
    """A norm that stands out.

    Attributes:
        step: where.
        value: the norm.
        times: how often that of the steps around it, infinite where those are 0.
    """

    step: int
    value: float
    times: float


def largest_spike(pairs: Sequence[tuple[int, float]]) -> Spike | None:
    """Return the norm that stands out most, ``None`` where none does.

    Before the first step there is nothing that it could stand out from: it is the beginning of a
    norm that falls as often as not.

    Args:
        pairs: step and norm, oldest first; what is not finite is left out.
    """
    finite = [pair for pair in pairs if math.isfinite(pair[1])]
    values = [value for _, value in finite]
    spike: Spike | None = None
    largest = _TIMES
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
