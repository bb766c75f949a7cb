"""Pictures of norms over time, of a session and of a run directory. Torch is not needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
from gradsurgeon.report.names import Name, matching
from gradsurgeon.report.norms import norm_rows, shown_keys, worst_rows
from gradsurgeon.report.over_time import DECADES, Columns, Largest, NormsOverTime
from gradsurgeon.report.page import Report
from gradsurgeon.report.picture import NONFINITE, ZERO, Picture, mark, plain
from gradsurgeon.report.rules_and_events import edits_of
from gradsurgeon.report.sources import summary
from gradsurgeon.report.sparkline import decades
from gradsurgeon.report.whole_norm import labels
from gradsurgeon.store import Key, RecordQueries

_LAYERS = 10
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


class _Source(NamedTuple):
    """What there is to draw of a session or a run: by name, in the order of the model, which records."""

    report: Report
    keys: dict[str, Key]

    @property
    def over_time(self) -> NormsOverTime:
        return NormsOverTime(self.report.measurements, self.keys)


def norms(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw l2 norms on a log axis: of the worst layers and of the whole, or of those that are named."""
    recorded = _recorded(source, name, rule)
    over_time = recorded.over_time
    largest, columns = over_time.largest(), over_time.columns
    figure = Picture(11, 4.8)
    axes = figure.subplots()
    handles = []
    shown = list(recorded.keys) if name is not None else _worst(recorded.report, rule)
    # Of a single parameter it is the curve of that.
    wholes = [
        (names, found)
        for names, found in over_time.wholes(_whole(recorded) if name is None else [])
        if len(names) > 1
    ]
    measured = [(names, {recorded.keys[one][::2] for one in names}) for names, _ in wholes]
    texts = labels(measured, len(recorded.report.params))
    for (_, found), text, colour in zip(wholes, texts, _WHOLE_COLOURS, strict=False):
        line = _line(axes, columns, found, 0, text=plain(text), colour=colour)
        # Beneath the layers, of which one can be nearly all of it, and still to be seen.
        line.set(linewidth=2.5, alpha=0.6)
        handles.append(line)
    for one, colour in zip(shown, _colours(len(shown)), strict=True):
        place = over_time.names.index(one)
        handles.append(_line(axes, columns, largest, place, text=plain(one), colour=colour))
    axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"l2 norm at {_points(recorded.keys[one] for one in shown)}")
    _dress(axes, columns, recorded.report)
    _legend(figure, axes, handles, _events(axes, recorded.report))
    return figure


def heatmap(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw parameters x steps, each cell the decade of the largest norm in it."""
    recorded = _recorded(source, name, rule)
    over_time = recorded.over_time
    largest, columns = over_time.largest(), over_time.columns
    rows = len(over_time.names)
    names = list(map(plain, over_time.names))
    # At least a pixel for each column, beside the names, and for each row: a single cell could be lost.
    height = max(3.6, min(20.0, 1.4 + 0.18 * rows), min(600.0, 1.4 + 0.012 * rows))
    figure = Picture(11 + 0.06 * max(map(len, names)), height)
    axes = figure.subplots()
    with np.errstate(divide="ignore"):
        logs = np.log10(largest.values)
    finite = logs[np.isfinite(logs)]
    low, high = decades(finite.tolist())
    place: dict[str, Any] = {
        "extent": (*columns.edges, rows - 0.5, -0.5),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    shown = np.ma.masked_invalid(np.where(np.isneginf(logs), np.nan, logs))
    image = axes.imshow(shown, vmin=low, vmax=high, cmap="viridis", **place)
    # What has no logarithm, above it: a step that is not finite takes its column, whatever else is in it.
    special = np.where(largest.nonfinite > 0, 1.0, np.where(largest.values == 0, 0.0, np.nan))
    colours = ListedColormap([ZERO, NONFINITE])
    axes.imshow(np.ma.masked_invalid(special), vmin=0, vmax=1, cmap=colours, **place)
    below = "min" if finite.min(initial=low) < low else "neither"
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.02, extend=below)
    bar.set_label(f"log10 of the l2 norm at {_points(recorded.keys.values())}", fontsize=9)
    every = -(-rows // _NAMED)
    axes.set_yticks(range(0, rows, every), names[::every], fontsize=7)
    _dress(axes, columns, recorded.report)
    kinds = ((1.0, NONFINITE, "non-finite"), (0.0, ZERO, "norm 0"))
    marks = [Patch(color=colour, label=text) for kind, colour, text in kinds if kind in special]
    figure.legend(handles=marks, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure


def density(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw how the norms of a step are distributed over the parameters, one column per step."""
    recorded = _recorded(source, name, rule)
    over_time = recorded.over_time
    counts, nonfinite = over_time.density()
    columns = over_time.columns
    figure = Picture(11, 4.8)
    axes = figure.subplots()
    there = np.flatnonzero(counts.any(axis=0))
    # A little room above and below; without any norm the axis stands around 1.
    around = there if len(there) else np.array([np.searchsorted(DECADES, 0.0)])
    low, high = max(0, around[0] - 2), min(len(DECADES) - 1, around[-1] + 3)
    each = counts.sum(axis=1, keepdims=True)
    shares = counts[:, low:high].T / np.maximum(each, 1).T
    image = axes.imshow(
        np.ma.masked_equal(shares, 0),
        extent=(*columns.edges, DECADES[low], DECADES[high]),
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        cmap="viridis",
    )
    figure.colorbar(image, ax=axes, pad=0.01).set_label("share of the parameters")
    axes.set_ylabel(f"log10 of the l2 norm at {_points(recorded.keys.values())}")
    _dress(axes, columns, recorded.report, "each column is that of {} records")
    steps = columns.steps[nonfinite > 0] + (columns.width - columns.every) / 2
    if len(steps):
        bad = mark(axes, steps, 1, "x", NONFINITE)
        bad.set_label("non-finite norms")
        figure.legend(handles=[bad], loc="outside lower right", fontsize=8, frameon=False)
    return figure


def _recorded(source: RecordQueries, name: Name | None, rule: str | None) -> _Source:
    """Return the report and what was recorded of the names, or say which rule is missing."""
    report = summary(source)  # type: ignore[arg-type] # a session or a run: there are no other
    keys = shown_keys(report.measurements, report.params, list(report.rules), rule)
    if keys:
        aliases = source._lookup().aliases  # noqa: SLF001 # known to what answers questions by name
        names = keys if name is None else matching(name, keys, aliases)
        return _Source(report, {one: keys[one] for one in names})
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


def _worst(report: Report, rule: str | None) -> list[str]:
    """Return the tensors whose norms went wrong: not finite before spikes, by how far they stand out."""
    rows = norm_rows(report.measurements, report.params, report.rules, rule)
    names = {row.name for row in worst_rows(rows, _LAYERS)}
    return [row.name for row in rows if row.name in names]


def _whole(recorded: _Source) -> list[str]:
    """Return the parameters whose norms are taken at one point, once a step: most of them, as a rule."""
    params = [name for name in recorded.report.params if name in recorded.keys]
    points = Counter(recorded.keys[name].point for name in params)
    point = max((one for one in points if one in _ONCE), key=lambda one: points[one], default="")
    return [name for name in params if recorded.keys[name].point == point]


def _points(keys: Iterable[Key]) -> str:
    return ", ".join(sorted({plain(key.point) for key in keys}))


def _colours(number: int) -> Sequence[Any]:
    if number <= _LAYERS:
        return [f"C{place}" for place in range(number)]
    # From the first layer to the last one.
    return list(colormaps["turbo"](np.linspace(0.05, 0.95, number)))


def _line(
    axes: Axes, columns: Columns, found: Largest, tensor: int, *, text: str, colour: Any
) -> Line2D:
    steps, values = found.path(tensor, columns)
    # A norm between two gaps has no line that would show it.
    edges = np.isnan(np.concatenate([[np.nan], values, [np.nan]]))
    alone = np.flatnonzero(~edges[1:-1] & edges[:-2] & edges[2:])
    (line,) = axes.plot(steps, values, color=colour, linewidth=1.1)
    if len(alone):
        line.set_marker(".")
        line.set_markevery(alone.tolist())
    bad = found.nonfinite[tensor]
    mark(axes, columns.steps[bad > 0], 1, "x", colour)
    mark(axes, columns.steps[found.values[tensor] == 0], 0, "v", colour)
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
    axes: Axes, columns: Columns, report: Report, stands_for: str = "the largest of each {} records"
) -> None:
    """Write the title, and what a column stands for that is no single step."""
    several = columns.width // columns.every
    axes.set_xlabel(f"step ({stands_for.format(f'{several:,}')})" if several > 1 else "step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    title = f"l2 norms: {plain(report.title)}"
    if report.records.dropped:
        title += " (the oldest records have made room)"
    axes.set_title(title, loc="left", fontsize=10, pad=10)
