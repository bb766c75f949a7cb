"""Numbers and curves as they travel in the page."""

from __future__ import annotations

from typing import Any

from gradsurgeon.report.whole_norm import Line
from gradsurgeon.store.json_text import json_number


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
