"""Curves as the page draws them, and the charts and tables of several losses. Needs numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gradsurgeon.report.loss_tables import combined_table, compared_table, pair_name
from gradsurgeon.report.losses import Combined, Compared, Curve
from gradsurgeon.store.layout import json_number

_MOST_POINTS = 1500
_CURVES, _WEIGHTS = 8, 20
# Points of a curve of losses: fewer than pixels, and enough to see since when.
_POINTS = 500


def line(label: str, steps: ArrayLike, values: Any, every: int = 1) -> dict[str, Any]:
    """Return a curve as it travels in the page, the worst of every few values if there are many.

    Args:
        label: its name.
        steps: of each value.
        values: `None` stands for no value.
        every: a value is the largest that is known of so many steps.
    """
    steps, values = np.asarray(steps, np.int64), np.asarray(values, object)
    there = np.array([value is not None for value in values], bool)
    floats = np.where(there, values, -np.inf).astype(float)
    # The worst is the first that is not finite, or else the largest.
    badness = np.where(there & ~np.isfinite(floats), np.inf, floats)
    # Several records of one step make one point.
    _, starts = np.unique(steps, return_index=True)
    ends = [*starts[:: max(1, -(-len(starts) // _MOST_POINTS))].tolist(), len(steps)]
    worst = [start + int(np.argmax(badness[start:end])) for start, end in pairwise(ends)]
    return {
        "label": label,
        "steps": steps[worst].tolist(),
        "values": [_number(floats[place]) if there[place] else None for place in worst],
        "every": every,
    }


def points(curve: Curve, most: int) -> tuple[list[int], list[float], int]:
    """Return at most so many points of a curve, each the first step and the mean of a few, and of how many steps."""
    steps, back = np.unique(curve.steps, return_inverse=True)
    if not len(steps):
        return [], [], 1
    # There may be several calls in a step, which count as one.
    each = np.bincount(back, curve.values) / np.bincount(back)
    starts = np.unique(np.arange(min(most, len(steps))) * len(steps) // min(most, len(steps)))
    means = np.add.reduceat(each, starts) / np.diff(np.append(starts, len(steps)))
    return steps[starts].tolist(), means.tolist(), -(-len(steps) // most)


def compared_data(found: Compared) -> dict[str, Any]:
    """Return table and curves of one rule that compares losses, the worst first."""
    worst = found.worst()
    curves = [_curve(pair_name(one), one.curve) for one in worst[:_CURVES] if one.calls]
    few = f" of the {len(curves)} worst" if len(curves) < len(worst) else ""
    table = compared_table(found)
    # The page draws no histories in the table.
    notes = [text for text in table.notes if not text.startswith("history: ")]
    table = table._replace(notes=notes)
    return {"table": table.plain(), "charts": [[f"cosine{few}", curves]]}


def combined_data(found: Combined, *, observed: bool) -> dict[str, Any]:
    """Return table and curves of one rule that combines losses."""
    weights = [_curve(one.name, one.curve) for one in found.weights[:_WEIGHTS]]
    distance = [_curve("distance", found.curve)]
    return {
        "table": combined_table(found, observed=observed).plain(),
        "charts": [["weight", weights], ["distance from the plain sum, over its norm", distance]],
    }


def _curve(label: str, curve: Curve) -> dict[str, Any]:
    return line(label, *points(curve, _POINTS))


def _number(value: float) -> float | str:
    # Six digits are more than anybody reads off a curve.
    return json_number(float(f"{value:.6g}"))
