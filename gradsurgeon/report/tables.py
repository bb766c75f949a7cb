"""A table of a report, as plain cells, and its renderings as text and HTML. The page reads the same cells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple

from gradsurgeon import _html
from gradsurgeon.planning.table import grid
from gradsurgeon.report.sparkline import decades, largest, level_line, sparkline

Level = Literal["", "warning", "bad"]
Curve = Sequence[float | None]

_WIDTH, _HEIGHT = 160, 18  # of a curve in HTML
_SPARK_WIDTH, _SPARK_LEAST = 32, 8
_HISTORY = 1  # the column of the curves
_BAD = "#e3262d"


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
        marks: a word behind some rows.
        notes: sentences that a reader needs, below the table.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    curves: Sequence[Curve] = ()
    ends: tuple[float, float] | None = None
    levels: Sequence[Level] = ()
    marks: Sequence[str] = ()
    notes: Sequence[str] = ()

    def lines(self, columns: int) -> Iterator[str]:
        """Yield the table as text without its notes. Names are never cut, because people copy them."""
        rows = [list(row) for row in self.rows]
        marks = ["", *(self.marks or [""] * len(rows))]
        if self.curves:
            widths = [2 + max(map(len, column)) for column in zip(self.head, *rows, strict=True)]
            room = columns - (sum(widths) - widths[_HISTORY] + 2) - max(map(len, marks))
            width = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
            for row, curve in zip(rows, self.curves, strict=True):
                row[_HISTORY] = self._drawn(curve, width)
        yield self.title
        if not self.head:
            return
        for line, mark in zip(grid([self.head, *rows], right=self.right), marks, strict=True):
            yield line + mark

    def _drawn(self, curve: Curve, width: int) -> str:
        if self.ends is None:
            return sparkline(curve, width)
        return level_line([value for value in means(curve, width) if value is not None], *self.ends)

    def html(self) -> Iterator[_html.Markup]:
        """Yield the table as a notebook shows it."""
        rows: list[list[object]] = [list(row) for row in self.rows]
        for row, curve in zip(rows, self.curves, strict=False):
            row[_HISTORY] = log_curve(curve) if self.ends is None else level_curve(curve, self.ends)
        yield _html.element("p", _html.bold(self.title))
        if self.head:
            yield _html.table(self.head, rows, right=self.right)
        if self.notes:
            yield _html.listing(self.notes)

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


def means(curve: Curve, most: int) -> list[float | None]:
    """Return at most so many values, each the mean of a few; `None` where there is none."""
    cells = min(most, len(curve))
    edges = [cell * len(curve) // cells for cell in range(cells + 1)] if cells else []
    found: list[float | None] = []
    for start, stop in pairwise(edges):
        known = [value for value in curve[start:stop] if value is not None]
        found.append(math.fsum(known) / len(known) if known else None)
    return found


def level_curve(curve: Curve, ends: tuple[float, float]) -> _html.Markup:
    """Draw a curve between two levels as SVG, with a line at 0."""
    low, high = ends
    points = [
        (at, value) for at, value in enumerate(means(curve, _WIDTH // 2)) if value is not None
    ]
    step, room = _WIDTH / max(1, len(points)), _HEIGHT - 4

    def height(value: float) -> str:
        return f"{_HEIGHT - 2 - (value - low) / (high - low) * room:.1f}"

    placed = [f"{(at + 0.5) * step:.1f},{height(value)}" for at, value in points]
    zero = f'<path d="M0 {height(0.0)}H{_WIDTH}" stroke-width="0.3"/>'
    return _svg(f'{zero}<polyline points="{" ".join([*placed, *placed[-1:]])}"/>')


def log_curve(norms: Curve) -> _html.Markup:
    """Draw a history of norms on a log scale as SVG in the colour of the text."""
    cells = largest(norms, _WIDTH // 2)
    logs = [math.log10(top) for top in cells if top is not None and 0 < top < math.inf]
    low, high = decades(logs)
    step = _WIDTH / max(1, len(cells))

    def point(at: int, top: float) -> str:
        height = max(0.0, (math.log10(top) - low) / (high - low))
        return f"{(at + 0.5) * step:.1f},{_HEIGHT - 2 - height * (_HEIGHT - 4):.1f}"

    places = list(enumerate(cells))
    shapes = []
    for drawn, run in groupby(places, key=lambda place: _is_drawn(place[1])):
        if drawn:
            points = [point(at, top) for at, top in run if top is not None]
            # A line of one point has no length, but round ends.
            shapes.append(f'<polyline points="{" ".join([*points, points[-1]])}"/>')
    shapes += [
        f'<path d="M{(at + 0.5) * step:.1f} {ends}" stroke="{colour}"/>'
        for at, top in places
        if top is not None and not _is_drawn(top)
        for ends, colour in [
            (f"{_HEIGHT - 4}V{_HEIGHT}", "currentColor") if top == 0 else (f"0V{_HEIGHT}", _BAD)
        ]
    ]
    return _svg("".join(shapes))


def _svg(shapes: str) -> _html.Markup:
    return _html.Markup(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" fill="none" '
        f'stroke="currentColor" stroke-width="1.2" stroke-linecap="round">{shapes}</svg>'
    )


def _is_drawn(top: float | None) -> bool:
    return top is not None and 0 < top < math.inf
