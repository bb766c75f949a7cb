"""The map of a comparison: distances over steps and the order of execution. Needs matplotlib."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import Patch, Rectangle

from gradsurgeon.comparison.alignment import Pairs
from gradsurgeon.comparison.findings import tensor_of
from gradsurgeon.report.plots import ZERO, Picture, plain

_NAMED = 60  # rows that have room for a name


def draw(pairs: Pairs, title: str, *, exact: bool) -> Picture:
    """Draw one row per tensor of a step and one column per step, coloured by distance over tolerance."""
    cells = pairs.cells
    keys = np.stack([cells["place"], cells["rank"]], axis=1)
    _, first, row = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    row, (steps, column) = row.reshape(-1), np.unique(cells["step"], return_inverse=True)
    values = np.full((len(first), len(steps)), np.nan)
    with np.errstate(divide="ignore"):
        logs = np.log10(cells["distance"] if exact else pairs.ratio)
    ends = (-8.0, 1.0) if exact else (-3.0, 3.0)
    values[row, column] = np.where(cells["undecided"], np.nan, np.clip(logs, *ends))
    names = [plain(tensor_of(pairs, at).text) for at in first.tolist()]
    height = max(3.6, min(12.0, 1.4 + 0.18 * len(names)))
    figure = Picture(9 + 0.06 * max(map(len, names)), height)
    axes = figure.subplots()
    image = axes.imshow(
        values,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis" if exact else "RdBu_r",
        vmin=ends[0],
        vmax=ends[1],
    )
    axes.set_facecolor(ZERO)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
    bar.set_label(f"log10 of the distance{'' if exact else ' / tolerance'}", fontsize=9)
    every = -(-len(names) // _NAMED)
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=7)
    shown = np.linspace(0, len(steps) - 1, min(len(steps), 12)).round().astype(int)
    axes.set_xticks(shown, [str(steps[one]) for one in shown.tolist()])
    axes.set_xlabel("step")
    axes.set_title(plain(title), loc="left", fontsize=10, pad=10)
    marks = [Patch(color=ZERO, label="missing, or decided by rounding")]
    if pairs.apart.any():
        border = int(np.argmax(pairs.apart))
        left, top, name = column[border] - 0.5, row[border] - 0.5, names[row[border]]
        mark: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 2}
        axes.add_patch(Rectangle((left, top), 1, 1, zorder=5, **mark))
        marks.append(Patch(label=f"the border: {name}", **mark))
    figure.legend(handles=marks, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure
