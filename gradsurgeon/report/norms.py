"""The table of gradient norms, and what stands out in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report.measured import STAT, Line, Measured
from gradsurgeon.report.spark import ASCII_NONFINITE, NONFINITE, ZERO, sparkline
from gradsurgeon.store import Key

if TYPE_CHECKING:
    from gradsurgeon.report.page import Report

_SPARK_WIDTH, _SPARK_LEAST = 32, 8
_ROWS = 40
_WORST_ROWS = 5  # kept for the worst of each sort, wherever in the model it is
_MARK = "  <- spike"
_NAMES = 4
# What the optimizer acted on is nearest to `accumulated`, the point all set-ups have in common.
_POINTS = ("accumulated", "step", "backward", "forward")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One row of the table."""

    name: str
    rule: str
    point: str
    line: Line

    @property
    def times(self) -> float:
        """How far the norm that stands out most does so, 0 where none does."""
        return self.line.spike.times if self.line.spike is not None else 0.0

    @property
    def always_zero(self) -> bool:
        return not self.line.nonfinite and self.line.top == 0


def norm_lines(report: Report, columns: int, *, ascii_only: bool) -> Iterator[str]:
    """Yield the table of norms and what stands out in it."""
    measured = report.measured
    keys = measured.keys()
    names = dict.fromkeys(
        (*report.params, *(n for key in keys if key.stat == STAT for n in key.names))
    )
    order = list(report.rules)
    layers = [layer for name in names if (layer := _layer(measured, name, order)) is not None]
    if not layers:
        recorded = printable(", ".join(sorted({key.stat for key in keys})))
        yield f"norms: no l2 recorded; recorded: {recorded or 'nothing'}"
        return
    noun = "parameter" if {layer.name for layer in layers} <= set(report.params) else "tensor"
    sources = Counter((layer.rule, layer.point) for layer in layers)
    yield f"norms (l2) of {count(len(layers), noun)}, recorded by {_named(sources)}"
    if others := _named({(key.rule, key.point) for key in keys if key.stat == STAT} - set(sources)):
        yield f"  recorded as well, not shown: {others}"
    shown = _selected(layers)
    yield from _table(shown, columns, several=len(sources) > 1, ascii_only=ascii_only)
    if len(shown) < len(layers):
        yield f"  ... and {len(layers) - len(shown):,} more; the worst are shown"
    mark = ASCII_NONFINITE if ascii_only else NONFINITE
    yield f"  log scale per row; {mark} non-finite norm, {ZERO} norm 0, blank: no gradient"
    if measured.sampled > 1:
        yield f"  median: that of one step in {measured.sampled:,}; all else is of every step"
    yield from _callouts(report, layers, noun)


def _named(sources: Iterable[tuple[str, str]]) -> str:
    return ", ".join(
        f"{printable(rule)} (at {printable(point)})" for rule, point in sorted(sources)
    )


def _layer(measured: Measured, name: str, order: Sequence[str]) -> _Layer | None:
    """Return the history of one tensor by the rule to be preferred, ``None`` without a value."""
    keys = measured.having(name)
    if not keys:
        return None
    best = min(keys, key=lambda key: _preference(key, order))
    return _Layer(name, best.rule, best.point, measured.line(name, best.rule, best.point))


def _preference(key: Key, order: Sequence[str]) -> tuple[int, int]:
    point = _POINTS.index(key.point) if key.point in _POINTS else len(_POINTS)
    return point, order.index(key.rule) if key.rule in order else len(order)


def _selected(layers: Sequence[_Layer]) -> list[_Layer]:
    """Return the rows to show, in model order: the worst are among them."""
    spiky = sorted(layers, key=lambda layer: -layer.times)
    # Of two sorts of worst: many non-finite rows must not crowd out the spike before them.
    broken = [layer for layer in spiky if layer.line.nonfinite]
    names = {layer.name for layer in (*spiky[:_WORST_ROWS], *broken[:_WORST_ROWS])}
    rest = [layer.name for layer in layers if layer.name not in names]
    names.update(rest[: _ROWS - len(names)])
    return [layer for layer in layers if layer.name in names]


def _table(
    shown: Sequence[_Layer], columns: int, *, several: bool, ascii_only: bool
) -> Iterator[str]:
    head = ["parameter", "history", "first", "median", "max", "last", "non-finite", "rule"]
    rows = [head if several else head[:-1]]
    for layer in shown:
        numbers = (layer.line.first, layer.line.middle, layer.line.top, layer.line.last)
        nonfinite = f"{layer.line.nonfinite:,}" if layer.line.nonfinite else "-"
        cells = [printable(layer.name), "", *(f"{value:.3g}" for value in numbers), nonfinite]
        rows.append([*cells, printable(layer.rule)] if several else cells)
    # The sparkline gets the room that is left; names are never cut, because people copy them.
    widths = [2 + max(map(len, column)) for column in zip(*rows, strict=True)]
    room = columns - (sum(widths) - widths[1] + 2) - len(_MARK)
    spark = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
    for layer, row in zip(shown, rows[1:], strict=True):
        row[1] = sparkline(layer.line.history, spark, ascii_only=ascii_only)
    worst = _spikiest(shown)
    marks = ["", *(_MARK if layer is worst else "" for layer in shown)]
    for line, mark in zip(grid(rows, right=frozenset({2, 3, 4, 5, 6})), marks, strict=True):
        yield line + mark


def _spikiest(layers: Sequence[_Layer]) -> _Layer | None:
    """Return the layer with the largest spike, ``None`` where there is none."""
    worst = max(layers, key=lambda layer: layer.times)
    return worst if worst.times else None


def _callouts(report: Report, layers: Sequence[_Layer], noun: str) -> Iterator[str]:
    if zero := [layer.name for layer in layers if layer.always_zero]:
        # Of the norm, because that of a gradient below 1e-23 is 0 as well in float32.
        yield f"  norm always exactly 0: {_listed(zero)}"
    if broken := [layer for layer in layers if layer.line.nonfinite]:
        first = min(layer.line.nonfinite_step for layer in broken)
        those = _listed([layer.name for layer in broken if layer.line.nonfinite_step == first])
        yield f"  non-finite: {count(len(broken), noun)}, first at step {first}: {those}"
    if (worst := _spikiest(layers)) is not None and (spike := worst.line.spike) is not None:
        times = f"{spike.times:.3g}x" if math.isfinite(spike.times) else "far above"
        yield (
            f"  largest spike: {printable(worst.name)}, {spike.value:.3g} at step {spike.step}, "
            f"{times} the steps around it"
        )
    having = {layer.name for layer in layers}  # a rule that never fired says so in its own row
    wanted = {
        name
        for rule, info in report.rules.items()
        if rule in report.statuses and report.statuses[rule].fired
        for name in info.logged
    }
    silent = wanted - having
    if listed := [name for name in report.params if name in silent]:
        yield f"  never got a gradient: {_listed(listed)}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:_NAMES])
    return shown + (f", and {len(names) - _NAMES:,} more" if len(names) > _NAMES else "")
