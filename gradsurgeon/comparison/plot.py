"""The map of a comparison: how far each tensor is apart, over steps and the order of execution. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch, Rectangle

from gradsurgeon.report.plots import NONFINITE, ZERO, Picture, plain

if TYPE_CHECKING:
    from gradsurgeon.comparison.comparison import Comparison

_NAMED = 60  # rows that have room for a name
_LEAST = -3.0  # decades of what is allowed: below them nothing is worth a colour


def draw(comparison: Comparison) -> Picture:
    """Draw one row per tensor of a step and one column per step, coloured by distance over tolerance."""
    pairs = comparison.pairs
    keys = np.stack([pairs.place, pairs.rank], axis=1)
    rows, first, row = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    steps, column = np.unique(pairs.step, return_inverse=True)
    exact = comparison.tolerance.kind == "exact"
    values = np.full((len(rows), len(steps)), np.nan)
    with np.errstate(divide="ignore"):
        values[row.reshape(-1), column] = np.log10(pairs.distance if exact else pairs.ratio)
    decided = np.zeros(values.shape, bool)
    decided[row.reshape(-1), column] = ~pairs.undecided
    names = [plain(_words(comparison, at)) for at in first.tolist()]
    height = max(3.6, min(20.0, 1.4 + 0.18 * len(rows)))
    figure = Picture(9 + 0.06 * max(map(len, names)), height)
    axes = figure.subplots()
    image = axes.imshow(
        np.ma.masked_invalid(np.where(decided, np.clip(values, -8 if exact else _LEAST, 8), np.nan)),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis" if exact else "RdBu_r",
        **({} if exact else {"vmin": _LEAST, "vmax": -_LEAST}),
    )
    axes.set_facecolor(ZERO)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
    bar.set_label(f"log10 of the distance{'' if exact else ' / tolerance'}", fontsize=9)
    every = -(-len(rows) // _NAMED)
    axes.set_yticks(range(0, len(rows), every), names[::every], fontsize=7)
    shown = np.linspace(0, len(steps) - 1, min(len(steps), 12)).round().astype(int)
    axes.set_xticks(shown, [str(steps[one]) for one in shown.tolist()])
    axes.set_xlabel("step")
    axes.set_title(plain(f"{comparison.run} against {comparison.reference}"), loc="left", fontsize=10, pad=10)
    marks = [Patch(color=ZERO, label="missing, or decided by rounding")]
    if comparison.first:
        border = int(np.flatnonzero(pairs.apart)[0])
        at = float(column[border]) - 0.5, float(row.reshape(-1)[border]) - 0.5
        style = {"fill": False, "edgecolor": NONFINITE, "linewidth": 2, "zorder": 5}
        axes.add_patch(Rectangle(at, 1, 1, **style))
        axes.axhline(at[1], color=NONFINITE, linewidth=0.8)
        marks.append(Patch(fill=False, edgecolor=NONFINITE, label=f"the border: {names[int(row.reshape(-1)[border])]}"))
    figure.legend(handles=marks, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure


def _words(comparison: Comparison, at: int) -> str:
    from gradsurgeon.comparison.findings import tensor_of  # noqa: PLC0415

    return tensor_of(comparison.pairs, at).text
