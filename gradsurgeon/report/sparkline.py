"""A history as one line of characters."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

Value = TypeVar("Value")

BLOCKS = "▁▂▃▄▅▆▇█"
NONFINITE = "✗"
ZERO = "_"
ABSENT = " "
LEGEND = (
    f"history: log scale per row; {NONFINITE} non-finite norm, {ZERO} norm 0, blank: no gradient"
)

# Noise of a few percent must not look like an earthquake, so a row spans a decade at least; below
# eight decades from its top a row is flat, so that a step stays visible next to a vanishing gradient.
_DECADES_LEAST, _DECADES_MOST = 1.0, 8.0


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw a history of norms on a log scale in at most so many characters; ``None`` is no gradient.

    Each character stands for a run of steps by its largest value, so that a spike of one step
    survives; a single non-finite one marks the whole run.
    """
    tops = [_top(run) for run in _runs(values, width)]
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


def level_line(values: Sequence[float | None], width: int, low: float, high: float) -> str:
    """Draw values on a linear scale between two ends; each character stands for the mean of a few."""
    known = [value for value in values if value is not None]
    places = (int((fmean(run) - low) / (high - low) * len(BLOCKS)) for run in _runs(known, width))
    return "".join(BLOCKS[max(0, min(len(BLOCKS) - 1, place))] for place in places)


def _runs(values: Sequence[Value], most: int) -> Iterator[Sequence[Value]]:
    """Yield the values in at most so many runs."""
    cells = min(most, len(values))
    edges = [cell * len(values) // cells for cell in range(cells + 1)] if cells else []
    return (values[start:stop] for start, stop in pairwise(edges))


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
