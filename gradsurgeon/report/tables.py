"""A table of a report, as plain cells, and as text. The page reads the same cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from gradsurgeon.planning.table import grid
from gradsurgeon.report.sparkline import level_line, sparkline

Level = Literal["", "warning", "bad"]
Curve = Sequence[float | None]

_SPARK_WIDTH, _SPARK_LEAST = 32, 8
_HISTORY = 1  # the column of the curves


class Table(NamedTuple):
    """A table whose second column is a curve, if it has curves.

    Attributes:
        title: what it is about.
        head: names of the columns.
        rows: cells, fit to be printed; the cell of a curve is empty.
        right: columns of numbers.
        curves: one for each row, the largest of each few values; `None` stands for a gap, NaN for non-finite.
        ends: the range of the curves; `None` for a log scale of each row.
        levels: how serious each row is.
        notes: sentences that a reader needs, below the table.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    curves: Sequence[Curve] = ()
    ends: tuple[float, float] | None = None
    levels: Sequence[Level] = ()
    notes: Sequence[str] = ()

    def lines(self, columns: int) -> Iterator[str]:
        """Yield the table as text without its notes. Names are never cut, because people copy them."""
        yield self.title
        if not self.head:
            return
        widths = [2 + max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        room = columns - (sum(widths) - widths[_HISTORY] + 2)
        width = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
        rows = [list(row) for row in self.rows]
        for row, curve in zip(rows, self.curves, strict=False):
            row[_HISTORY] = (
                sparkline(curve, width)
                if self.ends is None
                else level_line(curve, width, *self.ends)
            )
        yield from grid([self.head, *rows], right=self.right)

    def plain(self) -> dict[str, Any]:
        """Return title, head, rows without curves, how serious each row is, and notes, as the page takes them."""
        kept = [place for place in range(len(self.head)) if not (self.curves and place == _HISTORY)]
        return {
            "title": self.title,
            "head": [self.head[place] for place in kept],
            "rows": [[row[place] for place in kept] for row in self.rows],
            "levels": list(self.levels),
            "notes": list(self.notes),
        }
