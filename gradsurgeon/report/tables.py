"""A table of a report, as plain cells, and as text with a history per row. The page reads the same cells."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gradsurgeon.language.planning.table import grid

_SPARK_WIDTH = 32
_SPARK_LEAST = 8
_HISTORY = 1  # the column of the curves
_NAME_LEAST = 16

BLOCKS = "▁▂▃▄▅▆▇█"
NONFINITE = "✗"
ZERO = "_"
ABSENT = " "
LEGEND = (
    f"history: log scale per row; {NONFINITE} non-finite norm, {ZERO} norm 0, blank: no gradient"
)

# Noise of a few percent must not look like an earthquake, so a row spans a decade at least; below
# eight decades from its top a row is flat, so that a step stays visible next to a vanishing gradient.
_DECADES_LEAST = 1.0
_DECADES_MOST = 8.0


class Table(NamedTuple):
    """A table whose second column is a curve, if it has curves."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]  # fit to be printed; the cell of a curve is empty
    right: frozenset[int] = frozenset()  # columns of numbers
    curves: Sequence[Any] = ()  # an array for each row; a negative value stands for a gap
    notes: Sequence[str] = ()  # sentences that a reader needs, below the table

    def lines(self, columns: int, most: int | None = None) -> Iterator[str]:
        """Yield the table as text without its notes.

        A table of at most so many rows has shorter names, to leave room for the numbers. Otherwise names are never cut,
        because people copy them.
        """
        yield self.title
        if not self.head:
            return
        rows = [list(row) for row in self.rows[:most]]
        if most is not None:
            longest = max(_NAME_LEAST, columns // 3)
            for row in rows:
                row[0] = shortened(row[0], longest)
        if self.curves:
            # The other columns leave so many characters to a curve.
            room = columns - 2
            for cells in zip(self.head, *rows, strict=True):
                room -= 2 + max(map(len, cells))
            room += 2 + len(self.head[_HISTORY])
            width = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
            for row, curve in zip(rows, self.curves, strict=False):
                row[_HISTORY] = sparkline(curve, width)
        yield from grid([self.head, *rows], right=self.right)
        left_out = len(self.rows) - len(rows)
        if left_out:
            yield f"  ... and {left_out:,} more"

    def plain(self) -> dict[str, Any]:
        """Return what the page shows of the table, which draws curves of its own."""
        return {"title": self.title, "head": self.head, "rows": self.rows, "notes": self.notes}


def shortened(name: str, most: int) -> str:
    """Return a name in at most so many characters, without parts between dots; numbers stay, as they tell layers apart."""
    parts = name.split(".")
    short = name
    for place, part in enumerate(parts[:-1]):
        if len(short) <= most:
            break
        if not part.isdigit():
            parts[place] = "…"
            short = re.sub(r"…(\.…)+", "…", ".".join(parts))
    if len(short) <= most:
        return short
    end = (most - 1) // 2
    return f"{short[: most - 1 - end]}…{short[len(short) - end :]}"


def sparkline(values: Any, width: int) -> str:
    """Draw a history of norms on a log scale in at most so many characters; a negative norm stands for no gradient."""
    import numpy as np  # noqa: PLC0415 # tables without curves need none

    cells = min(width, len(values))
    if not cells:
        return ""
    starts = np.arange(cells) * len(values) // cells
    # The largest value of a few steps stands for them: a spike of one step, or a non-finite one, survives.
    tops = np.maximum.reduceat(values, starts).tolist()
    logs = [math.log10(top) for top in tops if 0 < top < math.inf]
    high = max(logs, default=0.0)
    low = max(min(logs, default=0.0), high - _DECADES_MOST)
    room = max(0.0, _DECADES_LEAST - (high - low)) / 2
    return "".join([_block(top, low - room, high + room) for top in tops])


def _block(top: float, low: float, high: float) -> str:
    if not math.isfinite(top):
        return NONFINITE
    if top == 0:
        return ZERO
    if top < 0:
        return ABSENT
    share = (math.log10(top) - low) / (high - low)
    level = min(len(BLOCKS) - 1, int(share * len(BLOCKS)))
    return BLOCKS[max(0, level)]
