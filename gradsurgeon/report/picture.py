"""The figure that all pictures are drawn on, and what they share. Needs matplotlib, but nothing of pyplot.

A figure of pyplot would stay in memory until somebody closes it, and want a display. A notebook shows only
those, so that this one tells notebooks itself how it looks.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gradsurgeon.errors import printable

_DPI = 100
_LONGEST = 60
NONFINITE, ZERO = "#e3262d", "#b0b0b0"


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def __init__(self, width: float, height: float, *, layout: Any = "constrained") -> None:
        super().__init__(figsize=(width, height), dpi=_DPI, layout=layout)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def plain(text: str) -> str:
    """Return a text of a user's as matplotlib shows it as it is: it reads formulas between dollars."""
    shown = printable(text)
    if len(shown) > _LONGEST:
        half = _LONGEST // 2 - 1
        shown = f"{shown[:half]} … {shown[-half:]}"
    # A label that begins with an underscore would be left out of legends.
    hidden = shown.startswith("_")
    return " " * hidden + shown.replace("$", r"\$")


def mark(axes: Axes, steps: Any, height: float, marker: str, colour: str) -> Line2D:
    """Mark steps at a height of the axes: 0 is the bottom, 1 the top."""
    (line,) = axes.plot(
        steps,
        [height] * len(steps),
        marker,
        color=colour,
        markersize=6,
        transform=axes.get_xaxis_transform(),
        clip_on=False,
        zorder=5,
    )
    line.set_in_layout(False)  # it may lie on the frame
    return line
