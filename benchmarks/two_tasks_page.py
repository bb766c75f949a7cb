"""The results of ``python -m benchmarks.two_tasks`` as a table and as a picture (matplotlib)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks import formatting, results, spikes_page
from benchmarks.machine import ROOT

RESULTS = results.FOLDER / "two_tasks" / "two_tasks.json"
PICTURE, GUIDE = ROOT / "rules" / "two_tasks.png", ROOT / "rules" / "guide" / "two-tasks.md"
BEGIN = "<!-- two tasks: begin; `python -m benchmarks.two_tasks` writes this -->\n"
END = "<!-- two tasks: end -->\n"
_HEAD = ("trained", "digits read", "ink explained")
# Of the weights only the one at which the two are nearest to one another.
SHOWN = {
    "the plain sum": "#c0392b",
    "weight of the ink 0.0001": "#9a9a9a",
    "ink standardised, the plain sum": "#222222",
    "`method: upgrad`": "#e59866",
    "`method: imtl-g`": "#1f6fb4",
}
dumps, fingerprint = spikes_page.dumps, spikes_page.fingerprint


def table(found: dict[str, Any]) -> str:
    """Return the table of the guide."""
    return formatting.table(_HEAD, [_cells(row) for row in found["rows"]])


def _cells(row: dict[str, Any]) -> list[str]:
    return [row["name"], *(_share(row[what]) for what in ("digits", "ink"))]


def _share(numbers: dict[str, Any]) -> str:
    """Return mean and spread; a guess worse than the mean of all explains nothing."""
    if numbers["mean"] < 0:
        return "none"
    return f"{numbers['mean']:.1f}% ± {numbers['sd']:.1f}"


def with_table(guide: str, found: dict[str, Any]) -> str:
    """Return the guide with the table of these results."""
    lacking = f"{GUIDE.name} has no place for the table"
    return formatting.filled(guide, BEGIN, table(found), END, lacking)


def draw(found: dict[str, Any], path: Any) -> None:
    """Draw what has been learnt of both by step, means over the seeds."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, places = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True, layout="constrained")
    rows = {row["name"]: row for row in found["rows"]}
    steps = range(found["every"], found["steps"] + 1, found["every"])
    for axes, what, title in zip(
        places,
        ("digits", "ink"),
        ("digits read, %", "variance of the ink explained, %"),
        strict=True,
    ):
        for name, colour in SHOWN.items():
            label = name.replace("`", "")
            axes.plot(steps, rows[name][what]["by_step"], color=colour, linewidth=1.4, label=label)
        axes.set(ylim=(0, 101), xlim=(0, found["steps"]), xlabel="step", title=title)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    places[1].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=100, metadata={"Software": None, "Description": fingerprint(found)})
    pyplot.close(figure)
