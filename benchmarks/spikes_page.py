"""The results of ``python -m benchmarks.spikes`` as a table and as a picture (matplotlib)."""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import formatting, results
from benchmarks.machine import ROOT

RESULTS = results.FOLDER / "spikes" / "spikes.json"
PICTURE, GUIDE = ROOT / "rules" / "spikes.png", ROOT / "rules" / "guide" / "spikes.md"
BEGIN = "<!-- spikes: begin; `python -m benchmarks.spikes` writes this -->\n"
END = "<!-- spikes: end -->\n"
_HEAD = (
    "bound on the norm",
    "final loss",
    "worst rise of the loss",
    "steps until recovered",
    "healthy steps touched",
    "healthy gradients touched",
    "bad batches caught",
)
_COLOURS = ("#222222", "#c0392b", "#e59866", "#b08fd8", "#1f6fb4", "#2e9e6b", "#9a9a9a")


def dumps(found: dict[str, Any]) -> str:
    """Return the text of the file: a line for each run."""
    head = {key: value for key, value in found.items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in found["rows"])
    return f'{json.dumps(head)[:-1]},\n "rows": [\n  {rows}\n ]}}\n'


def fingerprint(found: dict[str, Any]) -> str:
    """Return what tells which results a picture was drawn from."""
    return hashlib.sha256(dumps(found).encode()).hexdigest()


def table(found: dict[str, Any]) -> str:
    """Return the table of the guide."""
    return formatting.table(_HEAD, [_cells(row) for row in found["rows"]])


def with_table(guide: str, found: dict[str, Any]) -> str:
    """Return the guide with the table of these results."""
    lacking = f"{GUIDE.name} has no place for the table"
    return formatting.filled(guide, BEGIN, table(found), END, lacking)


def _cells(row: dict[str, Any]) -> list[str]:
    caught = row["bad_caught"]
    return [
        row["name"],
        f"{row['final_loss']:.4f}",
        f"x {row['worst_rise']:.1f}",
        f"{row['recovered']:.0f}",
        _share(row["healthy_steps_touched"]),
        _share(row["healthy_gradients_touched"]),
        "-" if caught is None else f"{caught} of {len(row['bad_times'])}",
    ]


def _share(value: float) -> str:
    return f"{100 * value:.1f}%" if value else "0"


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the losses, and the norms with the bounds on them."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, (upper, lower) = pyplot.subplots(
        2, figsize=(10, 8), sharex=True, height_ratios=(5, 4), layout="constrained"
    )
    steps = range(5, 10 * len(found["rows"][0]["losses"]), 10)
    for row, colour in zip(found["rows"], _COLOURS, strict=True):
        label = row["name"].replace("`", "")
        upper.plot(steps, row["losses"], color=colour, linewidth=1.1, label=label)
    upper.set(yscale="log", ylabel="loss (means of ten steps)")
    upper.legend(fontsize=8, ncols=2, loc="upper right")
    _norms(lower, found, steps)
    for axes in (upper, lower):
        axes.set_xlim(0, 10 * len(steps))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xlabel("step")
    figure.savefig(path, dpi=100, metadata={"Software": None, "Description": fingerprint(found)})
    pyplot.close(figure)


def _norms(axes: Any, found: dict[str, Any], steps: range) -> None:
    """Draw the norms of the run whose bound is learnt over one norm, before the cut, and all bounds."""
    row = next(row for row in found["rows"] if row["rule"] == found["learnt"]["rule"])
    every = 10 * len(steps) // (len(row["bad_norms"]) + 1)
    bad = [every * (number + 1) for number in range(len(row["bad_norms"]))]
    axes.plot(steps, row["norms"], color=_COLOURS[0], linewidth=1, label="healthy batches")
    axes.plot(bad, row["bad_norms"], "o", color=_COLOURS[1], markersize=5, label="bad batches")
    for bound, words, colour in zip(found["fixed"], ("first", "last"), _COLOURS[2:4], strict=True):
        label = f"max_norm: {bound:g}, by the {words} tenth"
        axes.axhline(bound, color=colour, linewidth=1.5, label=label)
    learnt = [float("nan") if bound is None else bound for bound in found["learnt"]["bounds"]]
    axes.plot(steps, learnt, color=_COLOURS[4], linewidth=1.4, label="learnt, sigmas: 2.5")
    axes.set(yscale="log", ylabel="norm of the whole gradient, before the cut")
    axes.legend(fontsize=8, ncols=3, loc="upper right")
