"""The table of gradient norms, and what stands out in it."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
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
NORM_NUMBERS = frozenset({2, 3, 4, 5, 6})  # columns of the table
_WORST_ROWS = 5  # kept for the worst of each sort, wherever in the model it is
_MARK = "  <- spike"
_NAMES = 4
_DEATHS = 3
# Norms of the layers of one model lie within fewer orders of magnitude; of few layers none is unusual.
_FAR, _LEAST_COMPARED = 1e4, 4
# What the optimizer acted on is nearest to `accumulated`, the point all set-ups have in common.
POINTS = ("accumulated", "step", "backward", "forward")


class NormRow(NamedTuple):
    name: str
    rule: str
    point: str
    history: NormHistory

    @property
    def times(self) -> float:
        """How many times the norms around it the largest spike is, 0 where there is none."""
        return self.history.spike.times if self.history.spike is not None else 0.0


class NormTable(NamedTuple):
    """The norms of a run, as text and page show them.

    Attributes:
        rows: every tensor that has norms.
        shown: those of them that are shown: the worst, if these are many.
        title: whose norms these are, and what recorded them; or that there are none.
        others: what was recorded as well.
        remarks: what stands out, a line each.
    """

    rows: Sequence[NormRow]
    shown: Sequence[NormRow]
    title: str
    others: str = ""
    remarks: Sequence[str] = ()

    @property
    def several(self) -> bool:
        """Whether several rules have recorded what is shown."""
        return len({(row.rule, row.point) for row in self.rows}) > 1


def norm_table(
    measurements: Measurements,
    params: Sequence[str],
    rules: Mapping[str, RuleInfo],
    statuses: Mapping[str, RuleStatus],
) -> NormTable:
    keys = measurements.keys()
    rows = norm_rows(measurements, params, rules)
    if not rows:
        recorded = printable(", ".join(sorted({key.stat for key in keys})))
        return NormTable([], [], f"norms: no l2 recorded; recorded: {recorded or 'nothing'}")
    noun = noun_of(rows, params)
    sources = Counter((row.rule, row.point) for row in rows)
    others = _named({(key.rule, key.point) for key in keys if key.stat == STAT} - set(sources))
    title = f"norms (l2) of {count(len(rows), noun)}, recorded by {_named(sources)}"
    remarks = list(callouts(rows, noun))
    having = {row.name for row in rows}  # a rule that never fired says so in its own row
    fired = [rules[rule] for rule in rules if rule in statuses and statuses[rule].fired]
    silent = {name for info in fired for name in info.logged} - having
    if listed := [name for name in params if name in silent]:
        remarks.append(f"never got a gradient: {_listed(listed)}")
    return NormTable(rows, selected(rows), title, others, remarks)


def norm_lines(
    measurements: Measurements,
    params: Sequence[str],
    rules: Mapping[str, RuleInfo],
    statuses: Mapping[str, RuleStatus],
    *,
    columns: int,
) -> Iterator[str]:
    found = norm_table(measurements, params, rules, statuses)
    yield found.title
    if not found.rows:
        return
    if found.others:
        yield f"  recorded as well, not shown: {found.others}"
    yield from _table(found.shown, columns, several=found.several)
    if len(found.shown) < len(found.rows):
        yield f"  ... and {len(found.rows) - len(found.shown):,} more; the worst are shown"
    yield f"  log scale per row; {NONFINITE} non-finite norm, {ZERO} norm 0, blank: no gradient"
    if measurements.sampled > 1:
        yield f"  median: that of one step in {measurements.sampled:,}; all else is of every step"
    yield from (f"  {remark}" for remark in found.remarks)


def _named(sources: Iterable[tuple[str, str]]) -> str:
    return ", ".join(
        f"{printable(rule)} (at {printable(point)})" for rule, point in sorted(sources)
    )


def shown_keys(
    measurements: Measurements, params: Sequence[str], order: Sequence[str], rule: str | None = None
) -> dict[str, Key]:
    """Return by name, in the order of the model, which of its records is shown: of one rule, or of all."""

    def preference(key: Key) -> tuple[int, int]:
        points, rules = [*POINTS, key.point], [*order, key.rule]
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
) -> list[NormRow]:
    return [
        NormRow(name, key.rule, key.point, measurements.history(name, key.rule, key.point))
        for name, key in shown_keys(measurements, params, list(rules), rule).items()
    ]


def worst_rows(rows: Sequence[NormRow], most: int) -> list[NormRow]:
    """Return so many rows: what is not finite first, then the largest spikes, then the largest medians."""
    return sorted(
        rows,
        key=lambda row: (
            not row.history.nonfinite,
            row.history.nonfinite_step,
            -row.times,
            -row.history.median if row.history.median > 0 else 0.0,  # NaN where no norm was finite
        ),
    )[:most]


def noun_of(rows: Sequence[NormRow], params: Sequence[str]) -> str:
    return "parameter" if {row.name for row in rows} <= set(params) else "tensor"


def selected(rows: Sequence[NormRow]) -> list[NormRow]:
    by_spike = sorted(rows, key=lambda row: -row.times)
    # Of two sorts of worst: many non-finite rows must not crowd out the spike before them.
    nonfinite = [row for row in by_spike if row.history.nonfinite]
    names = {row.name for row in (*by_spike[:_WORST_ROWS], *nonfinite[:_WORST_ROWS])}
    rest = [row.name for row in rows if row.name not in names]
    names.update(rest[: _ROWS - len(names)])
    return [row for row in rows if row.name in names]


def _table(shown: Sequence[NormRow], columns: int, *, several: bool) -> Iterator[str]:
    table = [norm_head(several=several), *(norm_cells(row, several=several) for row in shown)]
    # The sparkline gets the room that is left; names are never cut, because people copy them.
    widths = [2 + max(map(len, column)) for column in zip(*table, strict=True)]
    room = columns - (sum(widths) - widths[1] + 2) - len(_MARK)
    width = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
    for row, cells in zip(shown, table[1:], strict=True):
        cells[1] = sparkline(row.history.norms, width)
    worst = spikiest(shown)
    marks = ["", *(_MARK if row is worst else "" for row in shown)]
    for line, mark in zip(grid(table, right=NORM_NUMBERS), marks, strict=True):
        yield line + mark


def norm_head(*, several: bool) -> list[str]:
    head = ["parameter", "history", "first", "median", "max", "last", "non-finite", "rule"]
    return head if several else head[:-1]


def norm_cells(row: NormRow, *, several: bool) -> list[str]:
    """Return the cells of a row; that of the history is empty, and whoever draws it fills it."""
    history = row.history
    numbers = (history.first, history.median, history.largest, history.last)
    nonfinite = f"{history.nonfinite:,}" if history.nonfinite else "-"
    cells = [printable(row.name), "", *(f"{value:.3g}" for value in numbers), nonfinite]
    return [*cells, printable(row.rule)] if several else cells


def spikiest(rows: Sequence[NormRow]) -> NormRow | None:
    worst = max(rows, key=lambda row: row.times, default=None)
    return worst if worst is not None and worst.times else None


def callouts(rows: Sequence[NormRow], noun: str) -> Iterator[str]:
    """Yield what stands out, a sentence each, with the numbers that say so."""
    zero = [r.name for r in rows if r.history.largest == 0 and not r.history.nonfinite]
    if zero:
        # Of the norm, because that of a gradient below 1e-23 is 0 as well in float32.
        yield f"norm always exactly 0: {_listed(zero)}"
    yield from _died(rows)
    if nonfinite := [row for row in rows if row.history.nonfinite]:
        first = min(row.history.nonfinite_step for row in nonfinite)
        those = _listed([row.name for row in nonfinite if row.history.nonfinite_step == first])
        yield f"non-finite: {count(len(nonfinite), noun)}, first at step {first}: {those}"
    if (worst := spikiest(rows)) is not None and (spike := worst.history.spike) is not None:
        times = f"{spike.times:.3g}x" if math.isfinite(spike.times) else "far above"
        yield (
            f"largest spike: {printable(worst.name)}, {spike.value:.3g} at step {spike.step}, "
            f"{times} the steps around it"
        )
    yield from _vanishing_and_exploding(rows, noun)


def _died(rows: Sequence[NormRow]) -> Iterator[str]:
    """Name what was alive and has become 0, as a layer of ReLUs does that no longer answers to anything."""
    since: dict[int, list[str]] = {}
    for row in rows:
        if row.history.zero_since is not None:
            since.setdefault(row.history.zero_since, []).append(row.name)
    first = sorted(since)[:_DEATHS]
    for step in first:
        yield f"norm exactly 0 since step {step}, and until the end: {_listed(since[step])}"
    if later := sum(len(names) for step, names in since.items() if step not in first):
        yield f"norm exactly 0 until the end, since later steps: {later:,} more"


def _vanishing_and_exploding(rows: Sequence[NormRow], noun: str) -> Iterator[str]:
    """Name what lies far from the others, and what has grown or shrunk far."""
    usual = [row.history.median for row in rows if 0 < row.history.median < math.inf]
    if len(usual) >= _LEAST_COMPARED:
        middle = median(usual)
        for word, far in (
            ("vanishing", [r for r in rows if 0 < r.history.median * _FAR < middle]),
            ("exploding", [r for r in rows if middle * _FAR < r.history.median < math.inf]),
        ):
            if far:
                # The farthest is the evidence.
                most = max(far, key=lambda row: abs(math.log(row.history.median / middle)))
                yield (
                    f"{word}: {_listed([row.name for row in far])}; the median norm of "
                    f"{printable(most.name)} is {most.history.median:.3g}, and half of all {noun}s have "
                    f"{'more' if word == 'vanishing' else 'less'} than {middle:.3g}"
                )
    for word, grown in (
        ("has grown", [r for r in rows if _growth(r.history) > _FAR]),
        ("has shrunk", [r for r in rows if 0 < _growth(r.history) * _FAR < 1]),
    ):
        if grown:
            most = max(grown, key=lambda row: abs(math.log(_growth(row.history))))
            yield (
                f"{word} more than {_FAR:,.0f} times since it began: {_listed([r.name for r in grown])}; "
                f"{printable(most.name)} from {most.history.first:.3g} to {most.history.last:.3g}"
            )


def _growth(history: NormHistory) -> float:
    """Return how many times its first norm the last one is, 0 where that says nothing."""
    ends = history.first, history.last
    return ends[1] / ends[0] if all(0 < end < math.inf for end in ends) else 0.0


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:_NAMES])
    return shown + (f", and {len(names) - _NAMES:,} more" if len(names) > _NAMES else "")
