"""Numbers and curves as they travel in the page."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gradsurgeon.store.json_text import json_number

_MOST_POINTS = 1500


class Line(NamedTuple):
    """A curve: at each step a value, or `None` where there is none."""

    label: str
    steps: list[int]
    values: list[float | None]
    # Of more than one step, the largest that is known of so many.
    every: int = 1


def thinned(line: Line) -> Line:
    """Return a line with at most `_MOST_POINTS` points, the largest of every few; one that is not finite stays."""
    many = -(-len(line.steps) // _MOST_POINTS)
    if many <= 1:
        return line
    steps, values = [], []
    for start in range(0, len(line.steps), many):
        part = [
            (value, step)
            for step, value in zip(
                line.steps[start : start + many], line.values[start : start + many], strict=True
            )
            if value is not None
        ]
        bad = [pair for pair in part if not math.isfinite(pair[0])]
        value, step = bad[0] if bad else max(part, default=(None, line.steps[start]))
        steps.append(step)
        values.append(value)
    return Line(line.label, steps, values, line.every)


def line_data(line: Line) -> dict[str, Any]:
    return {
        "label": line.label,
        "steps": line.steps,
        "values": [None if value is None else number(value) for value in line.values],
        "every": line.every,
    }


def number(value: float) -> float | str:
    # Six digits are more than anybody reads off a curve.
    return json_number(float(f"{value:.6g}"))
