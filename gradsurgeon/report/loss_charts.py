"""How losses conflict and were combined, as the page shows it: tables, and curves over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsurgeon.report.loss_lines import (
    MATRIX_HINT,
    PAIR_HEAD,
    PAIR_HINTS,
    WEIGHT_HEAD,
    combined_remarks,
    combined_title,
    compared_remarks,
    compared_title,
    matrix,
    pair_cells,
    weight_rows,
)
from gradsurgeon.report.losses import Combined, Compared, Pair
from gradsurgeon.report.page_values import Line, line_data, number
from gradsurgeon.report.signed_curve import Curve, by_step, means_of

_PAIRS, _MATRICES, _CURVES, _WEIGHTS = 100, 12, 8, 20
# Points of a curve: fewer than pixels, and enough to see since when.
_POINTS = 500


def compared_data(found: Compared) -> dict[str, Any]:
    worst = found.worst()
    parts = list(dict.fromkeys(one.part for one in worst))  # those of the worst pairs first
    shown = parts[:_MATRICES]
    return {
        "title": compared_title(found),
        "remarks": list(compared_remarks(found)),
        "hints": list(PAIR_HINTS),
        "matrix_hint": MATRIX_HINT,
        "matrices": [_matrix(part, found.losses, found.parts[part]) for part in shown],
        "parts_left_out": len(parts) - len(shown),
        "head": _without_history(PAIR_HEAD),
        "pairs": [_without_history(pair_cells(one)) for one in worst[:_PAIRS]],
        "left_out": max(0, len(worst) - _PAIRS),
        "curves": [_curve(pair_cells(one)[0], one.curve) for one in worst[:_CURVES] if one.curve],
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
    return {
        "title": combined_title(found),
        "remarks": list(combined_remarks(found, observed=observed)),
        "head": _without_history(WEIGHT_HEAD),
        "weights": [_without_history(row) for row in weight_rows(found)[:_PAIRS]],
        "curves": [_curve(one.name, one.curve) for one in found.weights[:_WEIGHTS]],
        "distance": _curve("distance", found.curve),
    }


def _without_history(row: Sequence[str]) -> list[str]:
    return [row[0], *row[2:]]


def _curve(label: str, curve: Curve) -> dict[str, Any]:
    steps = by_step(curve)
    every = max(1, -(-len(steps) // _POINTS))
    means = means_of(steps, _POINTS)
    line = Line(label, [step for step, _ in means], [value for _, value in means], every)
    return line_data(line)
