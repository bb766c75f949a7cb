"""Pictures of norms over time, of a session and of a run directory. Torch is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gradsurgeon.errors import RecordError
from gradsurgeon.events import TRIPS, is_trip
from gradsurgeon.report.grid import Grid, grid_of
from gradsurgeon.report.history import History, Track, Whole
from gradsurgeon.report.names import Name, matching
from gradsurgeon.report.norms import labels, ranked
from gradsurgeon.report.picture import NONFINITE, ZERO, Picture, mark, plain
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import edits_of
from gradsurgeon.report.sources import summary
from gradsurgeon.report.sparkline import decades
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.store import RecordQueries

_LAYERS = 10
# Fewer than a picture has pixels, beside the longest names: what falls between two pixels is lost.
COLUMNS = 800
# What float32 can hold, in fifths of a decade.
DECADES = np.linspace(-46, 39, 426)
# Of those that two rules, or two optimizers, measure at different steps.
_WHOLE_COLOURS = ("black", "dimgray", "darkgray")
_IN_LEGEND = 24
_NAMED = 60  # rows of a heatmap that have room for a name
# Points at which a step has one record, so that the norms of a step add up to that of the whole.
_ONCE = ("accumulated", "step")
# Kinds of events that say something of a step; a trap and what it skips fall on the same step.
_EVENTS: dict[str, tuple[str, Any]] = {
    "trap": (NONFINITE, "-"),
    "spike": ("#d1495b", "-"),
    "check": ("#2e7d5b", "-"),
    "skipped-step": ("#f2a900", (0, (4, 4))),
    "scaler-skip": ("#3b78c3", (0, (2, 3))),
    "hook-lost": ("#8e44ad", "-"),
    "hook-rearmed": ("#8e44ad", ":"),
}


class _Drawn(NamedTuple):
    """What there is to draw of a session or a run: the tensors of one kind, in the order of the model."""

    report: Report
    history: History
    tracks: list[Track]

    @property
    def grid(self) -> Grid:
        return grid_of(self.tracks, COLUMNS)

    @property
    def points(self) -> str:
        return ", ".join(sorted({plain(track.source.point) for track in self.tracks}))


def norms(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw l2 norms on a log axis: of the layers that stand out and of the whole, or of those that are named."""
    drawn = _drawn(source, name, rule)
    grid, number = drawn.grid, len(drawn.report.params)
    figure = Picture(11, 4.8)
    axes = figure.subplots()
    handles = []
    # Of a single parameter it is the curve of that.
    wholes = [whole for whole in _wholes(drawn) if len(whole.names) > 1] if name is None else []
    texts = labels(wholes, number)
    for whole, text, colour in zip(wholes, texts, _WHOLE_COLOURS, strict=False):
        line = _line(axes, _of_whole(whole, grid), 0, text=plain(text), colour=colour)
        # Beneath the layers, of which one can be nearly all of it, and still to be seen.
        line.set(linewidth=2.5, alpha=0.6)
        handles.append(line)
    first = {track.name for track in ranked(drawn.tracks)[:_LAYERS]}
    shown = [
        place for place, track in enumerate(drawn.tracks) if name is not None or track.name in first
    ]
    for place, colour in zip(shown, _colours(len(shown)), strict=True):
        text = plain(drawn.tracks[place].name)
        handles.append(_line(axes, grid, place, text=text, colour=colour))
    axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"l2 norm at {drawn.points}")
    _dress(axes, grid, drawn.report)
    _legend(figure, axes, handles, _events(axes, drawn.report))
    return figure


def _wholes(drawn: _Drawn) -> list[Whole]:
    """Return the norms over all parameters whose norms are taken at one point, once a step."""
    kind = drawn.tracks[0].source.kind
    return [
        whole
        for whole in drawn.history.wholes(kind, {track.name for track in drawn.tracks})
        if all(source.point in _ONCE for source in whole.sources)
    ]


def _of_whole(whole: Whole, grid: Grid) -> Grid:
    """Return a whole norm over the columns of other tensors."""
    at = np.searchsorted(grid.firsts, whole.steps, side="right") - 1
    tops, bad = np.full((1, len(grid.firsts)), np.nan), np.zeros((1, len(grid.firsts)), np.int64)
    there = np.zeros((1, len(grid.firsts)), bool)
    finite = np.isfinite(whole.values)
    np.fmax.at(tops[0], at[finite], whole.values[finite])
    np.add.at(bad[0], at[~finite], 1)
    there[0, at] = True
    return Grid(grid.firsts, grid.lasts, tops, bad, there, there, grid.each)


def heatmap(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw parameters x steps, each cell the decade of the largest norm in it."""
    drawn = _drawn(source, name, rule)
    grid, names = drawn.grid, [plain(track.name) for track in drawn.tracks]
    rows = len(names)
    # At least a pixel for each column, beside the names, and for each row: a single cell could be lost.
    height = max(3.6, min(20.0, 1.4 + 0.18 * rows), min(600.0, 1.4 + 0.012 * rows))
    figure = Picture(11 + 0.06 * max(map(len, names)), height)
    axes = figure.subplots()
    with np.errstate(divide="ignore"):
        logs = np.log10(grid.tops)
    finite = logs[np.isfinite(logs)]
    low, high = decades(finite.tolist())
    place: dict[str, Any] = {
        "extent": (*_edges(grid), rows - 0.5, -0.5),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    shown = _spread(np.where(np.isneginf(logs), np.nan, logs), grid)
    image = axes.imshow(np.ma.masked_invalid(shown), vmin=low, vmax=high, cmap="viridis", **place)
    # What has no logarithm, above it: a step that is not finite takes its column, whatever else is in it.
    special = np.where(grid.bad > 0, 1.0, np.where(grid.tops == 0, 0.0, np.nan))
    colours = ListedColormap([ZERO, NONFINITE])
    axes.imshow(np.ma.masked_invalid(_spread(special, grid)), vmin=0, vmax=1, cmap=colours, **place)
    below = "min" if finite.min(initial=low) < low else "neither"
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.02, extend=below)
    bar.set_label(f"log10 of the l2 norm at {drawn.points}", fontsize=9)
    every = -(-rows // _NAMED)
    axes.set_yticks(range(0, rows, every), names[::every], fontsize=7)
    _dress(axes, grid, drawn.report)
    kinds = ((1.0, NONFINITE, "non-finite"), (0.0, ZERO, "norm 0"))
    marks = [Patch(color=colour, label=text) for kind, colour, text in kinds if kind in special]
    figure.legend(handles=marks, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure


def density(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw how the norms of a step are distributed over the parameters, one column per step."""
    drawn = _drawn(source, name, rule)
    grid = drawn.grid
    counts, nonfinite = _counted(drawn.tracks, grid)
    figure = Picture(11, 4.8)
    axes = figure.subplots()
    there = np.flatnonzero(counts.any(axis=0))
    # A little room above and below; without any norm the axis stands around 1.
    around = there if len(there) else np.array([np.searchsorted(DECADES, 0.0)])
    low, high = max(0, around[0] - 2), min(len(DECADES) - 1, around[-1] + 3)
    each = counts.sum(axis=1, keepdims=True)
    shares = counts[:, low:high].T / np.maximum(each, 1).T
    image = axes.imshow(
        np.ma.masked_equal(np.nan_to_num(_spread(shares, grid)), 0),
        extent=(*_edges(grid), DECADES[low], DECADES[high]),
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        cmap="viridis",
    )
    figure.colorbar(image, ax=axes, pad=0.01).set_label("share of the parameters")
    axes.set_ylabel(f"log10 of the l2 norm at {drawn.points}")
    _dress(axes, grid, drawn.report, "each column is that of {} records")
    if nonfinite.any():
        middles = (grid.firsts + grid.lasts) / 2
        bad = mark(axes, middles[nonfinite > 0], 1, "x", NONFINITE)
        bad.set_label("non-finite norms")
        figure.legend(handles=[bad], loc="outside lower right", fontsize=8, frameon=False)
    return figure


def _counted(tracks: Sequence[Track], grid: Grid) -> tuple[Any, Any]:
    """Return how many norms there are, columns x `DECADES`, zero left out, and how many are not finite."""
    bins, columns = len(DECADES) - 1, len(grid.firsts)
    counts, nonfinite = np.zeros(columns * bins, np.int64), grid.bad.sum(axis=0)
    for track in tracks:
        at = np.searchsorted(grid.firsts, track.steps, side="right") - 1
        drawn = track.tops > 0
        height = np.digitize(np.log10(track.tops[drawn].astype(float)), DECADES[1:-1])
        counts += np.bincount(at[drawn] * bins + height, minlength=len(counts))
    return counts.reshape(-1, bins), nonfinite


def _drawn(source: RecordQueries, name: Name | None, rule: str | None) -> _Drawn:
    """Return the report and what was recorded of the names, or say which rule is missing."""
    report = summary(source)  # type: ignore[arg-type] # a session or a run: there are no other
    history = report.history if rule is None else report.history_of(rule=rule)
    if history.kinds:
        aliases = source._lookup().aliases  # noqa: SLF001 # known to what answers questions by name
        # One picture has one scale: gradients and outputs, say, are not alike.
        by_kind = {kind: history.of_kind(kind) for kind in history.kinds}
        if name is None:
            return _Drawn(report, history, by_kind[history.kinds[0]])
        every = dict.fromkeys(track.name for tracks in by_kind.values() for track in tracks)
        wanted = set(matching(name, every, aliases))
        chosen = [
            [track for track in tracks if track.name in wanted] for tracks in by_kind.values()
        ]
        return _Drawn(report, history, max(chosen, key=len))
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


def _places(grid: Grid) -> tuple[Ints, float]:
    """Return the place of each column on an axis of even steps, and how many steps a place has."""
    if len(grid.firsts) < 2:  # noqa: PLR2004 # one column has no width of its own
        return np.zeros(len(grid.firsts), np.int64), float(grid.lasts[-1] - grid.firsts[0] + 1)
    since = grid.firsts - grid.firsts[0]
    width = max(float(np.median(np.diff(since))), float(since[-1]) / (COLUMNS - 1))
    return np.rint(since / width).astype(np.int64), width


def _spread(cells: Floats, grid: Grid) -> Floats:
    """Return an image, rows x columns, with a gap where no rule has looked for longer than usual."""
    at, _ = _places(grid)
    spread = np.full((len(cells), int(at[-1]) + 1), np.nan)
    for column, place in enumerate(at.tolist()):
        spread[:, place] = np.fmax(spread[:, place], cells[:, column])
    return spread


def _edges(grid: Grid) -> tuple[float, float]:
    """Return where the first column begins and the last one ends: each record stands in the middle of its share."""
    at, width = _places(grid)
    begin = float(grid.firsts[0]) - (width / 2 if len(grid.firsts) > 1 else 0.5)
    return begin, begin + width * (int(at[-1]) + 1)


def _colours(number: int) -> Sequence[Any]:
    if number <= _LAYERS:
        return [f"C{place}" for place in range(number)]
    # From the first layer to the last one.
    return list(colormaps["turbo"](np.linspace(0.05, 0.95, number)))


def _line(axes: Axes, grid: Grid, row: int, *, text: str, colour: Any) -> Line2D:
    steps, values = _path(grid, row)
    # A norm between two gaps has no line that would show it.
    edges = np.isnan(np.concatenate([[np.nan], values, [np.nan]]))
    alone = np.flatnonzero(~edges[1:-1] & edges[:-2] & edges[2:])
    (line,) = axes.plot(steps, values, color=colour, linewidth=1.1)
    if len(alone):
        line.set_marker(".")
        line.set_markevery(alone.tolist())
    bad = grid.bad[row]
    mark(axes, grid.firsts[bad > 0], 1, "x", colour)
    mark(axes, grid.firsts[grid.tops[row] == 0], 0, "v", colour)
    line.set_label(f"{text} ({bad.sum():,} non-finite)" if bad.any() else text)
    return line


def _path(grid: Grid, row: int) -> tuple[Any, Any]:
    """Return steps and norms of one tensor for a line with a NaN at each gap; a log axis has no place for 0.

    A gap is where a gradient was missing, or where no rule has looked for longer than usual.
    """
    at = np.flatnonzero(grid.measured[row])
    steps, values = grid.firsts[at].astype(np.float64), grid.tops[row, at]
    places, width = _places(grid)
    distances = np.diff(places[at])
    late = np.flatnonzero(distances > np.median(distances)) if len(distances) else distances
    steps = np.insert(steps, late + 1, steps[late] + width)
    return steps, np.insert(np.where(values > 0, values, np.nan), late + 1, np.nan)


def _events(axes: Axes, report: Report) -> list[Line2D]:
    """Draw a line across for each step of a kind of events; return what explains them in the legend."""
    handles = []
    # A rule that cuts spikes edits gradients, and may do so in every other step.
    edits = edits_of(report.rules)
    events = [one for one in report.events if one.kind not in TRIPS or is_trip(one, edits)]
    for kind, (colour, style) in _EVENTS.items():
        if steps := sorted({event.step for event in events if event.kind == kind}):
            across = axes.get_xaxis_transform()
            axes.vlines(
                steps, 0, 1, color=colour, linestyle=style, lw=1, transform=across, label=kind
            )
            handles.append(Line2D([], [], color=colour, linestyle=style, lw=1, label=kind))
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


def _dress(
    axes: Axes, grid: Grid, report: Report, stands_for: str = "the largest of each {} records"
) -> None:
    """Write the title, and what a column stands for that is no single step."""
    each = f"step ({stands_for.format(f'{grid.each:,}')})"
    axes.set_xlabel(each if grid.each > 1 else "step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    title = f"l2 norms: {plain(report.title)}"
    if report.records.dropped:
        title += " (the oldest records have made room)"
    axes.set_title(title, loc="left", fontsize=10, pad=10)
