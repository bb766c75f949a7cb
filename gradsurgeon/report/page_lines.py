"""Curves as the page draws them, and the charts and tables of several losses. Needs numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gradsurgeon.report.loss_tables import (
    MATRIX_HINT,
    combined_table,
    compared_table,
    matrix,
    pair_name,
)
from gradsurgeon.report.losses import Combined, Compared, Curve, Pair
from gradsurgeon.store.json_text import json_number

_MOST_POINTS = 1500
_MATRICES, _CURVES, _WEIGHTS = 12, 8, 20
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
    """Return matrices, table and curves of one rule that compares losses, the worst first."""
    worst = found.worst()
    parts = list(dict.fromkeys(one.part for one in worst))
    curves = [_curve(pair_name(one), one.curve) for one in worst[:_CURVES] if one.calls]
    few = f" of the {len(curves)} worst" if len(curves) < len(worst) else ""
    table = compared_table(found)
    # The page draws the matrix, which text has among the notes, and no histories.
    begin = table.notes.index(MATRIX_HINT) + 1 if MATRIX_HINT in table.notes else 0
    notes = [text for text in table.notes[begin:] if not text.startswith("history: ")]
    return {
        "table": table._replace(notes=notes).plain(),
        "hint": MATRIX_HINT,
        "matrices": [_matrix(part, found.losses, found.parts[part]) for part in parts[:_MATRICES]],
        "left_out": max(0, len(parts) - _MATRICES),
        "charts": [[f"cosine{few}", curves]],
    }


def _matrix(part: str, losses: Sequence[str], pairs: Sequence[Pair]) -> dict[str, Any]:
    place = {loss: number for number, loss in enumerate(losses)}
    # What colours a cell, from -1 to 1: the cosine, and below the diagonal the share of calls below 0.
    tints: list[list[float | str | None]] = [[None] * len(losses) for _ in losses]
    for one in pairs:
        row, column = sorted((place[one.first], place[one.second]))
        tints[row][column], tints[column][row] = _number(one.cosine), _number(-one.below)
    return {"part": part, "cells": matrix(losses, pairs), "tints": tints}


def combined_data(found: Combined, *, observed: bool) -> dict[str, Any]:
    """Return table and curves of one rule that combines losses."""
    weights = [_curve(one.name, one.curve) for one in found.weights[:_WEIGHTS]]
    distance = [_curve("distance", found.curve)]
    return {
        "table": combined_table(found, observed=observed).plain(),
        "hint": "",
        "matrices": [],
        "left_out": 0,
        "charts": [["weight", weights], ["distance from the plain sum, over its norm", distance]],
    }


def _curve(label: str, curve: Curve) -> dict[str, Any]:
    return line(label, *points(curve, _POINTS))


def _number(value: float) -> float | str:
    # Six digits are more than anybody reads off a curve.
    return json_number(float(f"{value:.6g}"))
