"""The overhead as a picture. Needs matplotlib."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import overhead
from benchmarks.machine import EXTRA
from benchmarks.report import about_machine, main_rows
from benchmarks.results import Result
from benchmarks.workloads import WORKLOADS

_COLOURS = {"baseline": "#999999", "rules": "#1f6fb4", "peer": "#d98032"}


class PlotError(Exception):
    """There is nothing to draw with, or nothing to draw."""


def matplotlib() -> Any:
    """Return the module that draws.

    Raises:
        PlotError: it is missing.
    """
    try:
        return import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise PlotError(f"drawing needs matplotlib, which is not installed: {EXTRA}") from error


def draw(result: Result, path: Path) -> None:
    """Draw the times of steps with rules and with peers, one panel per workload.

    Args:
        result: what was measured.
        path: of the PNG file.

    Raises:
        PlotError: matplotlib is missing, or the result has no overhead.
    """
    matplotlib().use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    measured = {row["workload"] for row in result["rows"] if row["group"] == overhead.GROUP}
    shown = [workload for workload in WORKLOADS if workload.name in measured]
    if not shown:
        raise PlotError("the result has no overhead to draw")
    heights = [len(main_rows(result, workload.name)) for workload in shown]
    figure, panels = pyplot.subplots(
        len(shown),
        figsize=(9, 0.24 * sum(heights) + 0.8 * len(shown)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axes, workload in zip(panels[:, 0], shown, strict=True):
        _panel(axes, main_rows(result, workload.name), f"{workload.name}: {workload.about}")
    panels[-1, 0].set_xlabel("time of a step, as a multiple of the bare one (median and quartiles)")
    figure.suptitle(about_machine(result), fontsize=9)
    figure.savefig(path, dpi=72)
    pyplot.close(figure)


def _panel(axes: Any, rows: list[overhead.Row], title: str) -> None:
    drawn = rows[::-1]  # bars are drawn from below
    ratios = [row["step_ratio"] for row in drawn]
    medians = [ratio["median"] for ratio in ratios]
    errors = [
        [ratio["median"] - ratio["low"] for ratio in ratios],
        [ratio["high"] - ratio["median"] for ratio in ratios],
    ]
    colours = [_COLOURS[row["kind"]] for row in drawn]
    axes.barh([row["case"] for row in drawn], medians, xerr=errors, color=colours, ecolor="#444444")
    axes.axvline(1.0, color="#444444", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
