"""The picture of norms over the steps, of a session or of a run directory. Torch is not needed."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gradsurgeon.common.events import TRIPS, is_trip
from gradsurgeon.common.match import compile_pattern, select, suggest
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.records.store import RecordQueries
from gradsurgeon.report.history import Grid, History, Track, grid_of
from gradsurgeon.report.norms import labels, ranked
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import edits_of
from gradsurgeon.report.sources import summary
from gradsurgeon.report.tables import shortened

Name = str | Sequence[str]

# Fewer columns than a picture has pixels, beside the longest names: what falls between two pixels is lost.
COLUMNS, _LONGEST = 800, 60
_LAYERS, _IN_LEGEND = 10, 24
NONFINITE = "#e3262d"
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
    """A figure that a notebook shows without pyplot, which keeps figures in memory and needs a display."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=100, layout="constrained")

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def plain(text: str) -> str:
    """Return a text of a user's for matplotlib, which reads formulas between dollars."""
    shown = shortened(printable(text), _LONGEST)
    # A label that begins with an underscore would be left out of legends.
    return " " * shown.startswith("_") + shown.replace("$", r"\$")


def matching(wanted: Name, names: Iterable[str], aliases: Mapping[str, str]) -> list[str]:
    """Return the names that are wanted, by name, alias or pattern, in the order of the model."""
    canonical = {name: name for name in names}
    known = {alias: name for alias, name in aliases.items() if name in canonical} | canonical
    found: set[str] = set()
    for text in [wanted] if isinstance(wanted, str) else wanted:
        # A name may read as a pattern: `lstm[0]` is a tensor of a module that returns several.
        every = list(known)
        places = [every.index(text)] if text in known else select([compile_pattern(text)], every)
        if not places:
            raise KeyError(f'"{text}" is no name of what was recorded; {suggest(text, every)}')
        found.update(known[every[place]] for place in places)
    return [name for name in canonical if name in found]


def norms(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw l2 norms on a log axis: of the layers that stand out and of all together, or of the named layers."""
    report, history, tracks = _drawn(source, name, rule)
    wholes = []
    if name is None:
        kind, every = tracks[0].source.kind, {track.name for track in tracks}
        wholes = [
            whole
            for whole in history.wholes(kind, every)
            if len(whole.names) > 1 and all(one.point in _ONCE for one in whole.sources)
        ]
        first = {track.name for track in ranked(tracks)[:_LAYERS]}
        tracks = [track for track in tracks if track.name in first]
    texts = [*labels(wholes, len(report.params)), *(track.name for track in tracks)]
    grid = grid_of([*wholes, *tracks], COLUMNS)
    # From the first layer to the last one.
    turbo = colormaps["turbo"](np.linspace(0.05, 0.95, len(tracks)))
    few = [f"C{place}" for place in range(len(tracks))]
    colours = [*["black"] * len(wholes), *(few if len(few) <= _LAYERS else turbo)]
    figure = Picture(11, 4.8)
    axes = figure.subplots()
    handles = [
        _line(axes, grid, row, text=plain(text), colour=colour)
        for row, (text, colour) in enumerate(zip(texts, colours, strict=True))
    ]
    for line in handles[: len(wholes)]:
        # Beneath the layers, of which one can be nearly all of it, and still to be seen.
        line.set(linewidth=2.5, alpha=0.6)
    axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"l2 norm at {_points(tracks)}")
    _dress(axes, grid, report)
    more = len(handles) - _IN_LEGEND
    figure.legend(
        handles=[*handles[:_IN_LEGEND], *_events(axes, report)],
        title=f"the first {_IN_LEGEND} of {len(handles)}" if more > 0 else None,
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
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


def _line(axes: Axes, grid: Grid, row: int, *, text: str, colour: Any) -> Line2D:
    """Draw the norms of one tensor: a log axis has no place for 0, which is marked below, and non-finite above.

    A gap is where a gradient was missing.
    """
    at = np.flatnonzero(grid.measured[row])
    values = np.where(grid.tops[row, at] > 0, grid.tops[row, at], np.nan)
    bad = grid.bad[row]
    # A norm between two gaps has no line that would show it, but a dot.
    style = {"color": colour, "linewidth": 1.1, "marker": ".", "markersize": 2}
    (line,) = axes.plot(grid.firsts[at], values, **style)
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


def _dress(axes: Axes, grid: Grid, report: Report) -> None:
    each = f"step (the largest of each {grid.each:,} records)"
    axes.set_xlabel(each if grid.each > 1 else "step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_title(f"l2 norms: {plain(report.title)}", loc="left", fontsize=10, pad=10)
