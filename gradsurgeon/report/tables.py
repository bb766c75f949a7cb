"""A table of a report, as plain cells, and as text with a history per row. The page reads the same cells."""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gradsurgeon.language.planning.table import grid

Curve = Sequence[float | None]

_SPARK_WIDTH, _SPARK_LEAST = 32, 8
_HISTORY = 1  # the column of the curves
_NAME_LEAST = 16

BLOCKS = "▁▂▃▄▅▆▇█"
NONFINITE, ZERO, ABSENT = "✗", "_", " "
LEGEND = (
    f"history: log scale per row; {NONFINITE} non-finite norm, {ZERO} norm 0, blank: no gradient"
)

# Noise of a few percent must not look like an earthquake, so a row spans a decade at least; below
# eight decades from its top a row is flat, so that a step stays visible next to a vanishing gradient.
_DECADES_LEAST, _DECADES_MOST = 1.0, 8.0


class Table(NamedTuple):
    """A table whose second column is a curve, if it has curves."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]  # fit to be printed; the cell of a curve is empty
    right: frozenset[int] = frozenset()  # columns of numbers
    curves: Sequence[Curve] = ()  # one for each row; `None` stands for a gap, NaN for non-finite
    notes: Sequence[str] = ()  # sentences that a reader needs, below the table

    def lines(self, columns: int, most: int | None = None) -> Iterator[str]:
        """Yield the table as text without its notes.

        A table of at most so many rows has shorter names, to leave room for the numbers. Otherwise names are never cut,
        because people copy them.
        """
        yield self.title
        if not self.head:
            return
        longest = sys.maxsize if most is None else max(_NAME_LEAST, columns // 3)
        rows = [[shortened(row[0], longest), *row[1:]] for row in self.rows[:most]]
        widths = [2 + max(map(len, column)) for column in zip(self.head, *rows, strict=True)]
        room = columns - (sum(widths) - widths[_HISTORY] + 2)
        width = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
        for row, curve in zip(rows, self.curves, strict=False):
            row[_HISTORY] = sparkline(curve, width)
        yield from grid([self.head, *rows], right=self.right)
        if len(rows) < len(self.rows):
            yield f"  ... and {len(self.rows) - len(rows):,} more"

    def plain(self) -> dict[str, Any]:
        """Return title, head, rows without curves, and notes, as the page takes them."""
        kept = [place for place in range(len(self.head)) if not (self.curves and place == _HISTORY)]
        return {
            "title": self.title,
            "head": [self.head[place] for place in kept],
            "rows": [[row[place] for place in kept] for row in self.rows],
            "notes": list(self.notes),
        }


def shortened(name: str, most: int) -> str:
    """Return a name in at most so many characters, without parts between dots; numbers stay, as they tell layers apart."""
    parts, short = name.split("."), name
    for place in range(len(parts) - 1):
        if len(short) <= most:
            break
        if not parts[place].isdigit():
            parts[place] = "…"
            short = re.sub(r"…(\.…)+", "…", ".".join(parts))
    end = (most - 1) // 2
    return short if len(short) <= most else f"{short[: most - 1 - end]}…{short[len(short) - end :]}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw a history of norms on a log scale in at most so many characters; ``None`` is no gradient."""
    # The largest value of a few steps stands for them: a spike of one step, or a non-finite one, survives.
    cells = min(width, len(values))
    edges = [cell * len(values) // cells for cell in range(cells + 1)] if cells else []
    tops = [_top(values[start:stop]) for start, stop in pairwise(edges)]
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


def decades(logs: Sequence[float]) -> tuple[float, float]:
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
