"""Pictures of norms and of several losses over the steps, of a session or of a run directory. Torch is not needed.

A figure of pyplot would stay in memory until somebody closes it, and need a display. A notebook shows only those, so
`Picture` tells notebooks itself how it looks.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.events import TRIPS, is_trip
from gradsurgeon.report.grid import Grid, grid_of
from gradsurgeon.report.history import History, Track
from gradsurgeon.report.losses import Curve
from gradsurgeon.report.names import Name, matching, shortened
from gradsurgeon.report.norms import labels, ranked
from gradsurgeon.report.page_lines import points
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import edits_of
from gradsurgeon.report.sources import summary
from gradsurgeon.report.sparkline import decades
from gradsurgeon.report.spikes import Floats
from gradsurgeon.store import RecordQueries

# Fewer columns than a picture has pixels, beside the longest names: what falls between two pixels is lost.
COLUMNS, _LONGEST = 800, 60
_LAYERS, _IN_LEGEND = 10, 24
_NAMED = 60  # rows of a heatmap that have room for a name
NONFINITE, ZERO = "#e3262d", "#b0b0b0"
# Two rules, or two optimizers, may measure at different steps, and make a whole norm each.
_WHOLE_COLOURS = ("black", "dimgray", "darkgray")
# Points at which a step has one record, so that the norms of a step add up to the norm of all.
_ONCE = ("accumulated", "step")
# Kinds of events that say something of a step; a trap and the step that it skips are one step.
_EVENTS: dict[str, tuple[str, Any]] = {
    "trap": (NONFINITE, "-"),
    "spike": ("#d1495b", "-"),
    "check": ("#2e7d5b", "-"),
    "skipped-step": ("#f2a900", (0, (4, 4))),
    "scaler-skip": ("#3b78c3", (0, (2, 3))),
    "hook-lost": ("#8e44ad", "-"),
    "hook-rearmed": ("#8e44ad", ":"),
}


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def __init__(self, width: float, height: float, *, layout: Any = "constrained") -> None:
        super().__init__(figsize=(width, height), dpi=100, layout=layout)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def plain(text: str) -> str:
    """Return a text of a user's for matplotlib, which reads formulas between dollars."""
    shown = shortened(printable(text), _LONGEST)
    # A label that begins with an underscore would be left out of legends.
    return " " * shown.startswith("_") + shown.replace("$", r"\$")


def norms(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw l2 norms on a log axis: of the layers that stand out and of all together, or of the named layers."""
    report, history, tracks = _drawn(source, name, rule)
    wholes = list(_wholes(history, tracks, len(report.params))) if name is None else []
    every = [*wholes, *tracks]
    grid = grid_of(every, COLUMNS)
    first = {track.name for track in (tracks if name is not None else ranked(tracks)[:_LAYERS])}
    rows = [row for row, one in enumerate(every) if row < len(wholes) or one.name in first]
    colours = [*_WHOLE_COLOURS[: len(wholes)], *_colours(len(rows) - len(wholes))]
    figure = Picture(11, 4.8)
    axes = figure.subplots()
    handles = [
        _line(axes, grid, row, text=plain(every[row].name), colour=colour)
        for row, colour in zip(rows, colours, strict=True)
    ]
    for line in handles[: len(wholes)]:
        # Beneath the layers, of which one can be nearly all of it, and still to be seen.
        line.set(linewidth=2.5, alpha=0.6)
    axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"l2 norm at {_points(tracks)}")
    _dress(axes, grid, report)
    _legend(figure, axes, handles, _events(axes, report))
    return figure


def _wholes(history: History, tracks: Sequence[Track], params: int) -> Iterator[Track]:
    """Yield the norms of several tensors together, as tracks: if each step has one record of them."""
    names = {track.name for track in tracks}
    found = [
        whole
        for whole in history.wholes(tracks[0].source.kind, names)
        if len(whole.names) > 1 and all(source.point in _ONCE for source in whole.sources)
    ][: len(_WHOLE_COLOURS)]
    for text, whole in zip(labels(found, params), found, strict=True):
        finite = np.isfinite(whole.values)
        yield replace(
            tracks[0],
            name=text,
            steps=whole.steps,
            tops=np.where(finite, whole.values, np.nan),
            bad=(~finite).astype(np.int64),
            there=np.ones(len(finite), bool),
        )


def heatmap(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw parameters x steps, each cell the decade of the largest norm in it."""
    report, _, tracks = _drawn(source, name, rule)
    grid, names = grid_of(tracks, COLUMNS), [plain(track.name) for track in tracks]
    rows = len(names)
    # At least a pixel for each column, beside the names, and for each row: a single cell could be lost.
    height = max(3.6, min(20.0, 1.4 + 0.18 * rows), min(600.0, 1.4 + 0.012 * rows))
    figure = Picture(11 + 0.06 * max(map(len, names)), height)
    axes = figure.subplots()
    with np.errstate(divide="ignore"):
        logs = np.where(grid.tops > 0, np.log10(grid.tops), np.nan)
    finite = logs[np.isfinite(logs)]
    low, high = decades(finite.tolist())
    # What has no logarithm, above it: a non-finite step takes its column, whatever else is in it.
    special = np.where(grid.bad > 0, 1.0, np.where(grid.tops == 0, 0.0, np.nan))
    image = _image(axes, logs, grid, vmin=low, vmax=high, cmap="viridis")
    _image(axes, special, grid, vmin=0, vmax=1, cmap=ListedColormap([ZERO, NONFINITE]))
    below = "min" if finite.min(initial=low) < low else "neither"
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.02, extend=below)
    bar.set_label(f"log10 of the l2 norm at {_points(tracks)}", fontsize=9)
    every = -(-rows // _NAMED)
    axes.set_yticks(range(0, rows, every), names[::every], fontsize=7)
    axes.set_ylim(rows - 0.5, -0.5)
    _dress(axes, grid, report)
    kinds = ((1.0, NONFINITE, "non-finite"), (0.0, ZERO, "norm 0"))
    marks = [Patch(color=colour, label=text) for kind, colour, text in kinds if kind in special]
    figure.legend(handles=marks, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure


def losses(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw cosines of pairs and weights: of the worst pairs, or of the named losses."""
    report = summary(source)
    panels: list[tuple[str, str, dict[str, Curve]]] = []
    for one in report.losses.compared:
        pairs = [pair for pair in one.worst() if pair.calls]
        of_pairs = {f"{pair.part}:{pair.name}".removeprefix(":"): pair.curve for pair in pairs}
        panels.append(("cosine", one.rule, of_pairs))
    for combined in report.losses.combined:
        weights = {weighed.name: weighed.curve for weighed in combined.weights}
        panels.append(("weight", combined.rule, weights))
    panels = [panel for panel in panels if rule in (None, panel[1])]
    if not panels:
        by = "" if rule is None else f" by a rule {rule!r}"
        raise RecordError(
            f"nothing to draw: nothing was recorded of several losses{by}; that takes a rule `conflict` or "
            '`combine`, and gradsurgeon.backward({"seg": seg_loss, ...})'
        )
    every = dict.fromkeys(one for *_, curves in panels for one in curves)
    wanted = every if name is None else dict.fromkeys(matching(name, every, {}))
    panels = [panel for panel in panels if wanted.keys() & panel[2].keys()]
    figure = Picture(11, 1.2 + 2.8 * len(panels))
    for axes, (stat, of, curves) in zip(
        figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels, strict=True
    ):
        chosen = [one for one in curves if one in wanted]
        shown = chosen[: None if name is not None else _LAYERS]
        for text in shown:
            steps, values, _ = points(curves[text], COLUMNS)
            marker = "." * (len(steps) == 1)
            axes.plot(steps, values, linewidth=1.1, marker=marker, label=plain(text))
        axes.axhline(0.0, color="#555555", linewidth=0.8)
        if stat == "cosine":
            axes.set_ylim(-1.05, 1.05)
        axes.set_ylabel(plain(f"{stat}, {of}"))
        axes.grid(alpha=0.25)
        more = len(chosen) - len(shown)
        title = f"and {more:,} more" if more else None
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(fontsize=8, frameon=False, title=title, **place)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.suptitle(f"losses: {plain(report.title)}", x=0.01, ha="left", fontsize=10)
    return figure


def _drawn(
    source: RecordQueries, name: Name | None, rule: str | None
) -> tuple[Report, History, list[Track]]:
    """Return the report, and the tensors of one kind in the order of the model, or say which rule is missing."""
    report = summary(source)
    history = report.history if rule is None else report.history_of(rule=rule)
    if history.kinds:
        # One picture has one scale: gradients and outputs, say, are not alike.
        by_kind = [history.of_kind(kind) for kind in history.kinds]
        if name is None:
            return report, history, by_kind[0]
        every = dict.fromkeys(track.name for tracks in by_kind for track in tracks)
        # Aliases are known to what answers questions by name.
        wanted = set(matching(name, every, source._lookup().aliases))  # noqa: SLF001
        chosen = [[track for track in tracks if track.name in wanted] for tracks in by_kind]
        return report, history, max(chosen, key=len)
    waiting = [one for one, info in report.rules.items() if info.logged and rule in (None, one)]
    if waiting:
        raise RecordError(
            f"nothing to draw yet: rule {waiting[0]} records l2 norms, and no gradient has arrived"
        )
    by = "" if rule is None else f" by a rule {rule!r}"
    raise RecordError(
        f"nothing to draw: no l2 norm was recorded{by}; that takes a step under a rule such as "
        '{id: norms, action: norm-log, params: "*"}'
    )


def _points(tracks: Sequence[Track]) -> str:
    return ", ".join(sorted({plain(track.source.point) for track in tracks}))


def _image(axes: Axes, cells: Floats, grid: Grid, **colours: Any) -> Any:
    """Draw an image, rows x steps: each record reaches up to the next one."""
    begins = np.append(grid.firsts, grid.lasts[-1] + 1) - 0.5
    heights = np.arange(len(cells) + 1) - 0.5
    return axes.pcolormesh(begins, heights, np.ma.masked_invalid(cells), **colours)


def _colours(number: int) -> Sequence[Any]:
    if number <= _LAYERS:
        return [f"C{place}" for place in range(number)]
    # From the first layer to the last one.
    return list(colormaps["turbo"](np.linspace(0.05, 0.95, number)))


def _line(axes: Axes, grid: Grid, row: int, *, text: str, colour: Any) -> Line2D:
    """Draw the norms of one tensor: a log axis has no place for 0, which is marked below, and non-finite above.

    A gap is where a gradient was missing.
    """
    at = np.flatnonzero(grid.measured[row])
    steps, values = grid.firsts[at], grid.tops[row, at]
    values = np.where(values > 0, values, np.nan)
    # A norm between two gaps has no line that would show it.
    edges = np.isnan(np.concatenate([[np.nan], values, [np.nan]]))
    alone = np.flatnonzero(~edges[1:-1] & edges[:-2] & edges[2:])
    bad = grid.bad[row]
    (line,) = axes.plot(steps, values, color=colour, linewidth=1.1)
    if len(alone):
        line.set_marker(".")
        line.set_markevery(alone.tolist())
    for marked, height, marker in ((bad > 0, 1, "x"), (grid.tops[row] == 0, 0, "v")):
        across, heights = axes.get_xaxis_transform(), [height] * int(marked.sum())
        style = {"color": colour, "markersize": 6, "clip_on": False, "zorder": 5}
        (marks,) = axes.plot(grid.firsts[marked], heights, marker, transform=across, **style)
        marks.set_in_layout(False)  # it may lie on the frame
    line.set_label(f"{text} ({bad.sum():,} non-finite)" if bad.any() else text)
    return line


def _events(axes: Axes, report: Report) -> list[Line2D]:
    """Draw a line across for each step of a kind of events; return what explains them in the legend."""
    handles = []
    # A rule that cuts spikes edits gradients, and may do so in every other step.
    edits = edits_of(report.rules)
    events = [one for one in report.events if one.kind not in TRIPS or is_trip(one, edits)]
    for kind, (colour, style) in _EVENTS.items():
        if steps := sorted({event.step for event in events if event.kind == kind}):
            looks: dict[str, Any] = {"color": colour, "linestyle": style, "lw": 1, "label": kind}
            axes.vlines(steps, 0, 1, transform=axes.get_xaxis_transform(), **looks)
            handles.append(Line2D([], [], **looks))
    return handles


def _legend(figure: Picture, axes: Axes, lines: Sequence[Line2D], events: Sequence[Line2D]) -> None:
    marks = [
        Line2D([], [], color="#555555", linestyle="", marker=marker, label=text)
        for marker, text in (("x", "non-finite"), ("v", "norm 0"))
        if any(line.get_marker() == marker and len(line.get_xdata()) for line in axes.lines)  # type: ignore[arg-type]
    ]
    more = len(lines) - _IN_LEGEND
    rest = [Line2D([], [], linestyle="", label=f"and {more:,} more")] if more > 0 else []
    handles = [*lines[:_IN_LEGEND], *rest, *marks, *events]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)


def _dress(axes: Axes, grid: Grid, report: Report) -> None:
    """Write the title, and what a column stands for that is no single step."""
    each = f"step (the largest of each {grid.each:,} records)"
    axes.set_xlabel(each if grid.each > 1 else "step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    title = f"l2 norms: {plain(report.title)}"
    if report.records.dropped:
        title += " (the oldest records have made room)"
    axes.set_title(title, loc="left", fontsize=10, pad=10)
