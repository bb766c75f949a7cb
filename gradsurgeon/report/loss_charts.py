"""How losses conflict and were combined, as the page shows it: tables, and curves over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradsurgeon.report.loss_tables import (
    MATRIX_HINT,
    combined_table,
    compared_table,
    matrix,
    pair_name,
)
from gradsurgeon.report.losses import Combined, Compared, Curve, Pair
from gradsurgeon.report.page_values import Line, line_data, number

_MATRICES, _CURVES, _WEIGHTS = 12, 8, 20
# Points of a curve: fewer than pixels, and enough to see since when.
_POINTS = 500


def compared_data(found: Compared) -> dict[str, Any]:
    worst = found.worst()
    parts = list(dict.fromkeys(one.part for one in worst))  # those of the worst pairs first
    shown = parts[:_MATRICES]
    curves = [_curve(pair_name(one), one.curve) for one in worst[:_CURVES] if one.calls]
    few = f" of the {len(curves)} worst" if len(curves) < len(worst) else ""
    table = compared_table(found)
    # The page draws the matrix, which text has among the notes, and no histories.
    begin = table.notes.index(MATRIX_HINT) + 1 if MATRIX_HINT in table.notes else 0
    notes = [text for text in table.notes[begin:] if not text.startswith("history: ")]
    return {
        "table": table._replace(notes=notes).plain(),
        "hint": MATRIX_HINT,
        "matrices": [_matrix(part, found.losses, found.parts[part]) for part in shown],
        "left_out": len(parts) - len(shown),
        "charts": [[f"cosine{few}", curves]],
    }


def _matrix(part: str, losses: Sequence[str], pairs: Sequence[Pair]) -> dict[str, Any]:
    place = {loss: number for number, loss in enumerate(losses)}
    # What colours a cell, from -1 to 1: the cosine, and below the diagonal the share of calls below 0.
    tints: list[list[float | str | None]] = [[None] * len(losses) for _ in losses]
    for one in pairs:
        row, column = sorted((place[one.first], place[one.second]))
        tints[row][column], tints[column][row] = number(one.cosine), number(-one.below)
    return {"part": part, "cells": matrix(losses, pairs), "tints": tints}


def combined_data(found: Combined, *, observed: bool) -> dict[str, Any]:
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
    steps, values = points(curve, _POINTS)
    every = max(1, -(-len(np.unique(curve.steps)) // _POINTS))
    return line_data(Line(label, steps, list(values), every))


def points(curve: Curve, most: int) -> tuple[list[int], list[float]]:
    """Return at most so many points of a curve, each the first step and the mean of a few."""
    steps, back = np.unique(curve.steps, return_inverse=True)
    if not len(steps):
        return [], []
    # There may be several calls in a step, which count as one.
    each = np.bincount(back, curve.values) / np.bincount(back)
    starts = np.unique(np.arange(min(most, len(steps))) * len(steps) // min(most, len(steps)))
    means = np.add.reduceat(each, starts) / np.diff(np.append(starts, len(steps)))
    return steps[starts].tolist(), means.tolist()
