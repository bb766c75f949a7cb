"""Pictures of several losses: the cosine of each pair over the steps, and the weights they were combined with."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gradsurgeon.errors import RecordError
from gradsurgeon.report.loss_charts import points
from gradsurgeon.report.losses import Compared, Curve
from gradsurgeon.report.names import Name, matching
from gradsurgeon.report.picture import Picture, plain
from gradsurgeon.report.sources import summary
from gradsurgeon.store import RecordQueries

_CURVES, _POINTS = 10, 800


def losses(source: RecordQueries, *, name: Name | None = None, rule: str | None = None) -> Picture:
    """Draw cosines of pairs and weights: of those that conflict most, or of those that are named."""
    report = summary(source)  # type: ignore[arg-type] # a session or a run: there are no other
    found = report.losses
    panels: list[tuple[str, str, dict[str, Curve]]] = [
        ("cosine", one.rule, _worst_first(one)) for one in found.compared
    ]
    panels += [
        ("weight", one.rule, {weighed.name: weighed.curve for weighed in one.weights})
        for one in found.combined
    ]
    panels = [panel for panel in panels if rule in (None, panel[1])]
    if not panels:
        by = "" if rule is None else f" by a rule {rule!r}"
        raise RecordError(
            f"nothing to draw: nothing was recorded of several losses{by}; that takes a rule `conflict` or "
            '`combine`, and gradsurgeon.backward({"seg": seg_loss, ...})'
        )
    if name is not None:
        every = dict.fromkeys(one for _, _, curves in panels for one in curves)
        wanted = set(matching(name, every, {}))
        panels = [
            (stat, of, {one: curve for one, curve in curves.items() if one in wanted})
            for stat, of, curves in panels
        ]
        panels = [panel for panel in panels if panel[2]]
    figure = Picture(11, 1.2 + 2.8 * len(panels))
    for axes, (stat, of, curves) in zip(
        figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels, strict=True
    ):
        shown = list(curves.items())[: None if name is not None else _CURVES]
        _draw(axes, shown, stat, f"{stat}, {of}", more=len(curves) - len(shown))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.suptitle(f"losses: {plain(report.title)}", x=0.01, ha="left", fontsize=10)
    return figure


def _worst_first(found: Compared) -> dict[str, Curve]:
    return {
        f"{one.part}:{one.name}" if one.part else one.name: one.curve
        for one in found.worst()
        if one.calls
    }


def _draw(
    axes: Axes, curves: Iterable[tuple[str, Curve]], stat: str, label: str, *, more: int
) -> None:
    for name, curve in curves:
        steps, values = points(curve, _POINTS)
        axes.plot(steps, values, linewidth=1.1, marker="." * (len(steps) == 1), label=plain(name))
    axes.axhline(0.0, color="#555555", linewidth=0.8)
    if stat == "cosine":
        axes.set_ylim(-1.05, 1.05)
    axes.set_ylabel(plain(label))
    axes.grid(alpha=0.25)
    title = f"and {more:,} more" if more else None
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, title=title)
