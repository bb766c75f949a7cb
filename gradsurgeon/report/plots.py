"""The pictures of norms over the steps and of captured tensors. Torch is not needed."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gradsurgeon.common._grouping import names_of
from gradsurgeon.common.events import is_trip
from gradsurgeon.common.match import compile_pattern, select, suggest
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.records.store.recorded import RecordSource
from gradsurgeon.report.history import OF_EACH_CALL, WholeNorm
from gradsurgeon.report.norms import labels, ranked
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import GRADIENT, edits_of
from gradsurgeon.report.sources import unread
from gradsurgeon.report.tables import shortened
from gradsurgeon.report.track import Track

Name = str | Sequence[str]

_LONGEST = 60
_LAYERS = 10
_IN_LEGEND = 24
_CHANNELS = 64
_IMAGES = 4  # dimensions of several images
_PER_ROW = 8
_RED = "#e3262d"
_SKIPS = frozenset({"skipped-step", "scaler-skip"})


class Picture(Figure):
    """A figure that a notebook shows without pyplot, which keeps figures in memory and needs a display."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=100, layout="constrained")

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def _plain(text: str) -> str:
    """Return a text of a user's for matplotlib, which reads formulas between dollars."""
    shown = shortened(printable(text), _LONGEST).replace("$", r"\$")
    # A label that begins with an underscore would be left out of legends.
    if shown.startswith("_"):
        return f" {shown}"
    return shown


def matching(wanted: Name, names: Iterable[str], aliases: Mapping[str, str]) -> set[str]:
    """Return the names that are wanted, by name, alias or pattern."""
    if isinstance(wanted, str):
        wanted = [wanted]
    known = {name: name for name in names}
    for alias, name in aliases.items():
        if name in known:
            known.setdefault(alias, name)
    texts = list(known)
    chosen = set()
    for text in wanted:
        # A name may read as a pattern: `lstm[0]` is a tensor of a module that returns several.
        fitting = [text]
        if text not in known:
            fitting = [texts[place] for place in select([compile_pattern(text)], texts)]
        if not fitting:
            raise KeyError(f'"{text}" is no name of what was recorded; {suggest(text, texts)}')
        chosen.update([known[name] for name in fitting])
    return chosen


def norms(source: RecordSource, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw l2 norms on a log axis: of the layers that stand out and of all together, or of the named layers."""
    recorded = source.recorded()
    report = unread(recorded)
    if rule is not None:
        report = replace(report, series=[part for part in report.series if part.key.rule == rule])
    history = report.history
    if not history.tracks:
        raise _nothing_to_draw(report, rule)
    # One picture has one scale: gradients and outputs, say, are not alike.
    kind = history.tracks[0].origin.kind
    wholes: list[WholeNorm] = []
    if name is None:
        shown = set(names_of(ranked(history.tracks_of(kind))[:_LAYERS]))
        if kind == GRADIENT:
            wholes = [whole for whole in history.gradients if _is_of_all(whole)]
    else:
        shown = matching(name, names_of(history.tracks), recorded.aliases)
        kind = next(track.origin.kind for track in history.tracks if track.name in shown)
    tracks = [track for track in history.tracks_of(kind) if track.name in shown]
    figure = Picture(11, 4.8)
    axes = figure.subplots()
    handles = _curves(axes, wholes, labels(wholes, len(report.params)), tracks)
    _dress(axes, report, tracks)
    title = None
    if len(handles) > _IN_LEGEND:
        title = f"the first {_IN_LEGEND} of {len(handles)}"
    handles = [*handles[:_IN_LEGEND], *_events(axes, report)]
    figure.legend(
        handles=handles, title=title, loc="outside right upper", fontsize=8, frameon=False
    )
    return figure


def _is_of_all(whole: WholeNorm) -> bool:
    # Several records in a step do not add up to the norm of all.
    return len(whole.names) > 1 and whole.point not in OF_EACH_CALL


def _curves(
    axes: Axes, wholes: Sequence[WholeNorm], texts: Sequence[str], tracks: Sequence[Track]
) -> list[Line2D]:
    """Draw a curve for each whole norm and each track."""
    curves = []
    for whole, text in zip(wholes, texts, strict=True):
        curve = _line(axes, whole, text, "black")
        # Beneath the layers, of which one can be nearly all of it, and still to be seen.
        curve.set(linewidth=2.5, alpha=0.6)
        curves.append(curve)
    # From the first layer to the last one.
    colours = colormaps["turbo"](np.linspace(0.05, 0.95, len(tracks)))
    for track, colour in zip(tracks, colours, strict=True):
        curves.append(_line(axes, track, track.name, tuple(colour)))
    return curves


def _nothing_to_draw(report: Report, rule: str | None) -> RecordError:
    for waiting, info in report.rules.items():
        if info.logged and rule in (None, waiting):
            return RecordError(
                f"nothing to draw yet: rule {waiting} records l2 norms, and no gradient has arrived"
            )
    by = ""
    if rule is not None:
        by = f" by a rule {rule!r}"
    return RecordError(
        f"nothing to draw: no l2 norm was recorded{by}; that takes a step under a rule such as "
        '{id: norms, action: norm-log, params: "*"}'
    )


def _line(axes: Axes, track: Track | WholeNorm, text: str, colour: Any) -> Line2D:
    """Draw the norms of one tensor; non-finite norms are marked above. A gap is where a gradient was missing or 0."""
    bad = ~np.isfinite(track.norms)
    values = np.where(bad | (track.norms <= 0), np.nan, track.norms)
    label = _plain(text)
    if bad.any():
        label = f"{label} ({bad.sum():,} non-finite)"
        across = axes.get_xaxis_transform()
        steps = track.steps[bad]
        (marks,) = axes.plot(steps, np.ones(len(steps)), "x", color=colour, transform=across)
        marks.set_clip_on(False)
        marks.set_in_layout(False)  # it lies on the frame
    # A norm between two gaps has no line that would show it, but a dot.
    style = {"color": colour, "linewidth": 1.1, "marker": ".", "markersize": 2}
    (line,) = axes.plot(track.steps, values, label=label, **style)
    return line


def _events(axes: Axes, report: Report) -> list[Line2D]:
    """Draw a line across for each step that was stopped, reported or skipped; return what explains them in the legend."""
    # A rule that cuts spikes edits gradients, and may do so in every other step.
    edits = edits_of(report.rules)
    steps = set()
    for event in report.events:
        if event.kind in _SKIPS or is_trip(event, edits):
            steps.add(event.step)
    if not steps:
        return []
    style: dict[str, Any] = {"color": _RED, "linewidth": 1}
    axes.vlines(sorted(steps), 0, 1, transform=axes.get_xaxis_transform(), **style)
    return [Line2D([], [], label="trap, check or skipped step", **style)]


def _dress(axes: Axes, report: Report, tracks: Sequence[Track]) -> None:
    points = sorted({_plain(track.origin.point) for track in tracks})
    axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"l2 norm at {', '.join(points)}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_title(f"l2 norms: {_plain(report.title)}", loc="left", fontsize=10, pad=10)


def features(
    kept: Mapping[tuple[str, int, int], Any],
    *,
    rule: str,
    name: Name | None,
    step: int | None,
    call: int | None,
    sample: int,
) -> Picture:
    """Draw the channels of one sample of a captured tensor of shape (N, C, H, W), each from its least to its largest."""
    if not kept:
        raise RecordError(f"rule {rule} has kept nothing yet: see `session.captured({rule!r})`")
    names = {key[0] for key in kept}
    if name is not None:
        names = matching(name, names, {})
    if len(names) > 1:
        raise ValueError(
            f"rule {rule} has kept {len(names):,} tensors: pass name=, such as {min(names)}"
        )
    fitting = []
    for key in kept:
        kept_name, kept_step, kept_call = key
        is_wanted = step in (None, kept_step) and call in (None, kept_call)
        if is_wanted and kept_name in names:
            fitting.append(key)
    if not fitting:
        raise RecordError(
            f"rule {rule} has kept nothing of step={step}, call={call}: see `session.captured({rule!r})`"
        )
    last = max(fitting)
    last_name, last_step, last_call = last
    maps = _channels(last_name, kept[last], sample)
    shown = maps[:_CHANNELS]
    figure = _grid_of(shown)
    place = f"{_plain(last_name)}, step {last_step}"
    if last_call:
        place += f", call {last_call}"
    channels = str(len(shown))
    if len(maps) > len(shown):
        channels += f" of {len(maps)}"
    height, width = maps.shape[1:]
    title = f"{place}, sample {sample}: {channels} channels of {height} x {width}"
    figure.suptitle(title, fontsize=9)
    return figure


def _grid_of(maps: Any) -> Picture:
    """Draw maps of shape (C, H, W) side by side, each on its own scale."""
    height, width = maps.shape[1:]
    rows = -(-len(maps) // _PER_ROW)
    shape = min(3.0, max(0.4, height / width))
    figure = Picture(1.15 * _PER_ROW, 0.7 + rows * (1.1 * shape + 0.15))
    colours = colormaps["gray"].with_extremes(bad=_RED)
    for number, channel in enumerate(maps):
        axes = figure.add_subplot(rows, _PER_ROW, number + 1)
        axes.imshow(channel.numpy(), cmap=colours)
        axes.set_title(str(number), fontsize=6, pad=1.5)
        axes.set_axis_off()
    return figure


def _channels(name: str, tensor: Any, sample: int) -> Any:
    """Return the channels of one sample; of complex elements the magnitudes."""
    from gradsurgeon.tensors import _dist  # noqa: PLC0415 # needs torch, as only captures do

    if _dist.is_sharded(tensor) or tensor.dim() != _IMAGES:
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)}, and feature maps have (N, C, H, W), whole on one rank: "
            "capture a module that returns such, and choose it by name="
        )
    if not 0 <= sample < len(tensor):
        raise ValueError(f"sample {sample} of {name} is not there: there are {len(tensor)}, from 0")
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    if dense.is_complex():
        dense = dense.abs()
    return dense[sample].cpu().double()
