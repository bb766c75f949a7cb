"""A history as one line of characters."""

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
NONFINITE = "✗"
ZERO = "_"
ABSENT = " "

# Noise of a few percent must not look like an earthquake, so a row spans a decade at least; below
# eight decades from its top a row is flat, so that a step stays visible next to a vanishing gradient.
_DECADES_LEAST, _DECADES_MOST = 1.0, 8.0


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw a history of norms on a log scale in at most so many characters; ``None`` is no gradient.

    Each character stands for a run of steps by its largest value, so that a spike of one step
    survives; a single non-finite one marks the whole run.
    """
    tops = largest(values, width)
    low, high = decades([math.log10(top) for top in tops if top is not None and 0 < top < math.inf])

    def draw(top: float | None) -> str:
        if top is None:
            return ABSENT
        if not math.isfinite(top):
            return NONFINITE
        if top <= 0:
            return ZERO
        share = (math.log10(top) - low) / (high - low)
        return BLOCKS[max(0, min(len(BLOCKS) - 1, int(share * len(BLOCKS))))]

    return "".join(map(draw, tops))


def level_line(values: Sequence[float], low: float, high: float) -> str:
    """Draw finite values on a linear scale between two ends, a character each."""
    room = (high - low) or 1.0
    places = (int((value - low) / room * len(BLOCKS)) for value in values)
    return "".join(BLOCKS[max(0, min(len(BLOCKS) - 1, place))] for place in places)


def largest(values: Sequence[float | None], most: int) -> list[float | None]:
    """Return at most so many values, each the largest of a run of steps; NaN where one is not finite."""
    cells = min(most, len(values))
    edges = [cell * len(values) // cells for cell in range(cells + 1)] if cells else []
    return [_top(values[start:stop]) for start, stop in pairwise(edges)]


def decades(logs: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis for decimal logarithms."""
    low, high = (min(logs), max(logs)) if logs else (0.0, 0.0)
    low = max(low, high - _DECADES_MOST)
    room = max(0.0, _DECADES_LEAST - (high - low)) / 2
    return low - room, high + room


def _top(values: Sequence[float | None]) -> float | None:
    """Return the largest value, NaN where one is not finite, ``None`` where there is none."""
    there = [value for value in values if value is not None]
    if not all(map(math.isfinite, there)):
        return math.nan
    return max(there, default=None)
