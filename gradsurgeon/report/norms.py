"""The table of gradient norms, and what stands out in it."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.events import RuleStatus
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report.measurements import STAT, Measurements, NormHistory
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.report.sparkline import NONFINITE, ZERO, sparkline
from gradsurgeon.store import Key

_SPARK_WIDTH, _SPARK_LEAST = 32, 8
_ROWS = 40
_WORST_ROWS = 5  # kept for the worst of each sort, wherever in the model it is
_MARK = "  <- spike"
_NAMES = 4
# What the optimizer acted on is nearest to `accumulated`, the point all set-ups have in common.
_POINTS = ("accumulated", "step", "backward", "forward")


class Row(NamedTuple):
    name: str
    rule: str
    point: str
    history: NormHistory

    @property
    def times(self) -> float:
        """How many times the norms around it the largest spike is, 0 where there is none."""
        return self.history.spike.times if self.history.spike is not None else 0.0


def norm_lines(
    measurements: Measurements,
    params: Sequence[str],
    rules: Mapping[str, RuleInfo],
    statuses: Mapping[str, RuleStatus],
    *,
    columns: int,
) -> Iterator[str]:
    keys = measurements.keys()
    rows = norm_rows(measurements, params, rules)
    if not rows:
        recorded = printable(", ".join(sorted({key.stat for key in keys})))
        yield f"norms: no l2 recorded; recorded: {recorded or 'nothing'}"
        return
    noun = "parameter" if {row.name for row in rows} <= set(params) else "tensor"
    sources = Counter((row.rule, row.point) for row in rows)
    yield f"norms (l2) of {count(len(rows), noun)}, recorded by {_named(sources)}"
    if others := _named({(key.rule, key.point) for key in keys if key.stat == STAT} - set(sources)):
        yield f"  recorded as well, not shown: {others}"
    shown = selected(rows)
    yield from _table(shown, columns, several=len(sources) > 1)
    if len(shown) < len(rows):
        yield f"  ... and {len(rows) - len(shown):,} more; the worst are shown"
    yield f"  log scale per row; {NONFINITE} non-finite norm, {ZERO} norm 0, blank: no gradient"
    if measurements.sampled > 1:
        yield f"  median: that of one step in {measurements.sampled:,}; all else is of every step"
    yield from _callouts(rows, noun)
    having = {row.name for row in rows}  # a rule that never fired says so in its own row
    fired = [rules[rule] for rule in rules if rule in statuses and statuses[rule].fired]
    silent = {name for info in fired for name in info.logged} - having
    if listed := [name for name in params if name in silent]:
        yield f"  never got a gradient: {_listed(listed)}"


def _named(sources: Iterable[tuple[str, str]]) -> str:
    return ", ".join(
        f"{printable(rule)} (at {printable(point)})" for rule, point in sorted(sources)
    )


def shown_keys(
    measurements: Measurements, params: Sequence[str], order: Sequence[str], rule: str | None = None
) -> dict[str, Key]:
    """Return by name, in the order of the model, which of its records is shown: of one rule, or of all."""

    def preference(key: Key) -> tuple[int, int]:
        points, rules = [*_POINTS, key.point], [*order, key.rule]
        return points.index(key.point), rules.index(key.rule)

    keys = measurements.keys()
    names = dict.fromkeys((*params, *(n for key in keys if key.stat == STAT for n in key.names)))
    found = {}
    for name in names:
        candidates = [key for key in measurements.keys_of(name) if rule in (None, key.rule)]
        if candidates:
            found[name] = min(candidates, key=preference)
    return found


def norm_rows(
    measurements: Measurements, params: Sequence[str], rules: Iterable[str], rule: str | None = None
) -> list[Row]:
    return [
        Row(name, key.rule, key.point, measurements.history(name, key.rule, key.point))
        for name, key in shown_keys(measurements, params, list(rules), rule).items()
    ]


def selected(rows: Sequence[Row]) -> list[Row]:
    by_spike = sorted(rows, key=lambda row: -row.times)
    # Of two sorts of worst: many non-finite rows must not crowd out the spike before them.
    nonfinite = [row for row in by_spike if row.history.nonfinite]
    names = {row.name for row in (*by_spike[:_WORST_ROWS], *nonfinite[:_WORST_ROWS])}
    rest = [row.name for row in rows if row.name not in names]
    names.update(rest[: _ROWS - len(names)])
    return [row for row in rows if row.name in names]


def _table(shown: Sequence[Row], columns: int, *, several: bool) -> Iterator[str]:
    head = ["parameter", "history", "first", "median", "max", "last", "non-finite", "rule"]
    table = [head if several else head[:-1]]
    for row in shown:
        history = row.history
        numbers = (history.first, history.median, history.largest, history.last)
        nonfinite = f"{history.nonfinite:,}" if history.nonfinite else "-"
        cells = [printable(row.name), "", *(f"{value:.3g}" for value in numbers), nonfinite]
        table.append([*cells, printable(row.rule)] if several else cells)
    # The sparkline gets the room that is left; names are never cut, because people copy them.
    widths = [2 + max(map(len, column)) for column in zip(*table, strict=True)]
    room = columns - (sum(widths) - widths[1] + 2) - len(_MARK)
    width = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
    for row, cells in zip(shown, table[1:], strict=True):
        cells[1] = sparkline(row.history.norms, width)
    worst = _spikiest(shown)
    marks = ["", *(_MARK if row is worst else "" for row in shown)]
    for line, mark in zip(grid(table, right=frozenset({2, 3, 4, 5, 6})), marks, strict=True):
        yield line + mark


def _spikiest(rows: Sequence[Row]) -> Row | None:
    worst = max(rows, key=lambda row: row.times)
    return worst if worst.times else None


def _callouts(rows: Sequence[Row], noun: str) -> Iterator[str]:
    zero = [r.name for r in rows if r.history.largest == 0 and not r.history.nonfinite]
    if zero:
        # Of the norm, because that of a gradient below 1e-23 is 0 as well in float32.
        yield f"  norm always exactly 0: {_listed(zero)}"
    if nonfinite := [row for row in rows if row.history.nonfinite]:
        first = min(row.history.nonfinite_step for row in nonfinite)
        those = _listed([row.name for row in nonfinite if row.history.nonfinite_step == first])
        yield f"  non-finite: {count(len(nonfinite), noun)}, first at step {first}: {those}"
    if (worst := _spikiest(rows)) is not None and (spike := worst.history.spike) is not None:
        times = f"{spike.times:.3g}x" if math.isfinite(spike.times) else "far above"
        yield (
            f"  largest spike: {printable(worst.name)}, {spike.value:.3g} at step {spike.step}, "
            f"{times} the steps around it"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:_NAMES])
    return shown + (f", and {len(names) - _NAMES:,} more" if len(names) > _NAMES else "")
