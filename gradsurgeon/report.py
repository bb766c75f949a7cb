"""What a run looked like, as text for a person. No torch: records read from disk are drawn alike."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.planning.table import count, grid
from gradsurgeon.store import Key, Records, merged

if TYPE_CHECKING:
    from gradsurgeon.runtime import Session

BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = ".:-=+*#@"
NONFINITE, _ASCII_NONFINITE = "✗", "!"
ZERO = "_"
ABSENT = " "

_SPARK_WIDTH, _SPARK_LEAST = 32, 8
_ROWS = 40
_WORST_ROWS = 5  # kept for the worst of each sort, wherever in the model it is
_MARK = "  <- spike"
_EVENTS = 20
_NAMES = 4
# Noise of a few percent must not look like an earthquake, so a row spans a decade at least; below
# eight decades from its top a row is flat, so that a step stays visible next to a vanishing gradient.
_DECADES_LEAST, _DECADES_MOST = 1.0, 8.0
# What the optimizer acted on is nearest to `accumulated`, the point all set-ups have in common.
_POINTS = ("accumulated", "step", "backward")


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What the report has to know of a rule: its action and role, and whose l2 norms it records."""

    action: str
    role: str = "edit"
    logged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A run in plain values; ``str(report)`` is the text.

    Attributes:
        title: what was run, for the first line.
        params: canonical names in the order of the model.
        rules: every rule by id, in file order.
        statuses: what each rule did.
        records: everything measured.
        events: what happened, oldest first.
    """

    title: str
    params: tuple[str, ...]
    rules: Mapping[str, RuleInfo]
    statuses: Mapping[str, RuleStatus]
    records: Records = field(default_factory=Records)
    events: Sequence[Event] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, *, width: int | None = None, ascii_only: bool = False) -> str:
        """Return the whole report.

        Args:
            width: columns to fill, those of the terminal where not given.
            ascii_only: draw and write with ASCII only, for streams that cannot encode blocks.
        """
        columns = width or shutil.get_terminal_size((100, 24)).columns
        sections = [
            [self._header()],
            list(_layers(self, columns, ascii_only=ascii_only)),
            list(_rules(self)),
            list(_happened(self.events)),
        ]
        text = "\n\n".join("\n".join(section) for section in sections if section)
        return text.encode("ascii", "backslashreplace").decode("ascii") if ascii_only else text

    def _header(self) -> str:
        seen = [row.step for series in self.records for row in series.rows]
        seen += [one.last_step for one in self.statuses.values() if one.last_step is not None]
        steps = f"steps {min(seen)}..{max(seen)}" if seen else "no step seen"
        kinds = Counter(event.kind for event in self.events)
        by_kind = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        events = count(len(self.events), "event") + (f" ({by_kind})" if by_kind else "")
        dropped = self.records.dropped
        lost = (
            f"; {count(dropped, 'row')} dropped, the oldest: memory is bounded" if dropped else ""
        )
        return f"summary: {printable(self.title)}: {steps}, {events}{lost}"


def summary(session: Session) -> Report:
    """Return the report of a session, running or removed. Waits for the device."""
    plan = session.plan
    rules = {
        rule.id: RuleInfo(
            action=rule.action,
            role=rule.role,
            logged=tuple(binding.name for binding in plan.of(rule.id))
            if "l2" in getattr(rule, "stats", ())
            else (),
        )
        for rule in plan.rules.rules
    }
    return Report(
        title=f"{plan.rules.file} on {plan.manifest.origin}",
        params=tuple(param.name for param in plan.manifest.params),
        rules=rules,
        statuses=session.status(),
        records=session.records,
        events=tuple(session.events),
    )


def needs_ascii(encoding: str | None) -> bool:
    """Tell whether a stream of this encoding cannot show the blocks of a sparkline."""
    try:
        (BLOCKS + NONFINITE).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """Draw a history of norms on a log scale, oldest first.

    Args:
        values: one norm per step, ``None`` where there was no gradient.
        width: the most characters to use. Each stands for a run of steps by its largest value, so
            that a spike of one step survives; a single non-finite one marks the whole run.
        ascii_only: draw with ASCII only.
    """
    cells = min(width, len(values))
    edges = [cell * len(values) // cells for cell in range(cells + 1)] if cells else []
    tops = [_top(values[start:stop]) for start, stop in pairwise(edges)]
    logs = [math.log10(top) for top in tops if top is not None and 0 < top < math.inf]
    low, high = (min(logs), max(logs)) if logs else (0.0, 0.0)
    low = max(low, high - _DECADES_MOST)
    middle, span = (low + high) / 2, max(high - low, _DECADES_LEAST)
    blocks, nonfinite = (_ASCII_BLOCKS, _ASCII_NONFINITE) if ascii_only else (BLOCKS, NONFINITE)

    def draw(top: float | None) -> str:
        if top is None:
            return ABSENT
        if not math.isfinite(top):
            return nonfinite
        if top <= 0:
            return ZERO
        share = (math.log10(top) - middle) / span + 0.5
        return blocks[max(0, min(len(blocks) - 1, int(share * len(blocks))))]

    return "".join(map(draw, tops))


def _top(values: Sequence[float | None]) -> float | None:
    """Return the largest value, NaN where one is not finite, ``None`` where there is none."""
    there = [value for value in values if value is not None]
    if not all(map(math.isfinite, there)):
        return math.nan
    return max(there, default=None)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The history of one parameter. The numbers are over its finite values, but first and last."""

    name: str
    rule: str
    point: str
    history: tuple[float | None, ...]
    first: float
    middle: float
    top: float
    top_step: int
    last: float
    nonfinite: int
    nonfinite_step: int

    @property
    def ratio(self) -> float:
        """How far the maximum stands out: 1 is a flat line."""
        if self.middle > 0:
            return self.top / self.middle
        return math.inf if self.top > 0 else 0.0

    @property
    def always_zero(self) -> bool:
        return not self.nonfinite and self.top == 0


def _layers(report: Report, columns: int, *, ascii_only: bool) -> Iterator[str]:
    """Yield the table of norms and what stands out in it."""
    layers = [layer for name in report.params if (layer := _layer(report, name)) is not None]
    if not layers:
        recorded = sorted({series.key.stat for series in report.records})
        yield f"norms: no l2 recorded; recorded: {', '.join(recorded) or 'nothing'}"
        return
    sources = Counter((layer.rule, layer.point) for layer in layers)
    yield f"norms (l2) of {count(len(layers), 'parameter')}, recorded by {_named(sources)}"
    if others := _named(
        {(s.key.rule, s.key.point) for s in report.records if s.key.stat == "l2"} - set(sources)
    ):
        yield f"  recorded as well, not shown: {others}"
    shown = _selected(layers)
    yield from _table(shown, columns, several=len(sources) > 1, ascii_only=ascii_only)
    if len(shown) < len(layers):
        yield f"  ... and {len(layers) - len(shown):,} more; the worst are shown"
    mark = _ASCII_NONFINITE if ascii_only else NONFINITE
    yield f"  log scale per row; {mark} non-finite norm, {ZERO} norm 0, blank: no gradient"
    yield from _callouts(report, layers)


def _named(sources: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{printable(rule)} (at {point})" for rule, point in sorted(sources))


def _layer(report: Report, name: str) -> _Layer | None:
    """Return the history of one parameter by the rule to be preferred, ``None`` without a value."""
    found = [series for series in report.records.series(name, "l2") if series.of(name)]
    if not found:
        return None
    order = list(report.rules)
    best = min((series.key for series in found), key=lambda key: _preference(key, order))
    own = [s for s in found if (s.key.rule, s.key.point) == (best.rule, best.point)]
    pairs = merged(own, name)
    missing = [(row.step, None) for s in own for row in s.rows if s.columns[name] in row.absent]
    timeline: list[tuple[int, float | None]] = [*pairs, *missing]
    finite = [(value, step) for step, value in pairs if math.isfinite(value)]
    broken = [step for step, value in pairs if not math.isfinite(value)]
    top, top_step = max(finite, key=lambda pair: pair[0], default=(math.nan, 0))
    return _Layer(
        name=name,
        rule=best.rule,
        point=best.point,
        # By step alone: a step without a gradient has no value to compare.
        history=tuple(value for _, value in sorted(timeline, key=lambda pair: pair[0])),
        first=pairs[0][1],
        middle=median(value for value, _ in finite) if finite else math.nan,
        top=top,
        top_step=top_step,
        last=pairs[-1][1],
        nonfinite=len(broken),
        nonfinite_step=min(broken, default=0),
    )


def _preference(key: Key, order: Sequence[str]) -> tuple[int, int]:
    return _POINTS.index(key.point), order.index(key.rule) if key.rule in order else len(order)


def _selected(layers: Sequence[_Layer]) -> list[_Layer]:
    """Return the rows to show, in model order: the worst are among them."""
    spiky = sorted(layers, key=lambda layer: -layer.ratio)
    # Of two sorts of worst: many non-finite rows must not crowd out the spike before them.
    broken = [layer for layer in spiky if layer.nonfinite]
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
        numbers = (layer.first, layer.middle, layer.top, layer.last)
        nonfinite = f"{layer.nonfinite:,}" if layer.nonfinite else "-"
        cells = [printable(layer.name), "", *(f"{value:.3g}" for value in numbers), nonfinite]
        rows.append([*cells, printable(layer.rule)] if several else cells)
    # The sparkline gets the room that is left; names are never cut, because people copy them.
    widths = [2 + max(map(len, column)) for column in zip(*rows, strict=True)]
    room = columns - (sum(widths) - widths[1] + 2) - len(_MARK)
    spark = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
    for layer, row in zip(shown, rows[1:], strict=True):
        row[1] = sparkline(layer.history, spark, ascii_only=ascii_only)
    worst = _spikiest(shown)
    marks = ["", *(_MARK if layer is worst else "" for layer in shown)]
    for line, mark in zip(grid(rows, right=frozenset({2, 3, 4, 5, 6})), marks, strict=True):
        yield line + mark


def _spikiest(layers: Sequence[_Layer]) -> _Layer | None:
    """Return the layer whose maximum stands out most, ``None`` where all are flat."""
    worst = max(layers, key=lambda layer: layer.ratio)
    return worst if worst.ratio > 1 else None


def _callouts(report: Report, layers: Sequence[_Layer]) -> Iterator[str]:
    if zero := [layer.name for layer in layers if layer.always_zero]:
        # Of the norm, because that of a gradient below 1e-23 is 0 as well in float32.
        yield f"  norm always exactly 0: {_listed(zero)}"
    if broken := [layer for layer in layers if layer.nonfinite]:
        first = min(layer.nonfinite_step for layer in broken)
        those = _listed([layer.name for layer in broken if layer.nonfinite_step == first])
        yield f"  non-finite: {count(len(broken), 'parameter')}, first at step {first}: {those}"
    if (worst := _spikiest(layers)) is not None:
        times = f"{worst.ratio:.3g}x" if math.isfinite(worst.ratio) else "far above"
        yield (
            f"  largest spike: {printable(worst.name)}, {worst.top:.3g} at step {worst.top_step}, "
            f"{times} its median"
        )
    having = {layer.name for layer in layers}  # a rule that never fired says so in its own row
    wanted = {
        name
        for rule, info in report.rules.items()
        if rule in report.statuses and report.statuses[rule].fired
        for name in info.logged
    }
    if silent := [name for name in report.params if name in wanted - having]:
        yield f"  never got a gradient: {_listed(silent)}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:_NAMES])
    return shown + (f", and {len(names) - _NAMES:,} more" if len(names) > _NAMES else "")


def _rules(report: Report) -> Iterator[str]:
    """Yield what each rule did."""
    if not report.statuses:
        return
    rows = [("rule", "action", "matched", "fired", "changed", "last step", "")]
    for rule, status in report.statuses.items():
        info = report.rules.get(rule, RuleInfo("?"))
        rows.append(
            (
                printable(rule),
                printable(info.action),
                f"{status.matched:,}",
                f"{status.fired:,}",
                "-" if info.role == "observe" else f"{100 * status.changed:.3g}%",
                "-" if status.last_step is None else str(status.last_step),
                _remark(info, status),
            )
        )
    yield f"rules ({len(report.statuses)})"
    yield from grid(rows, right=frozenset({2, 3, 4, 5}))


def _remark(info: RuleInfo, status: RuleStatus) -> str:
    if not status.fired:
        return "NEVER FIRED"
    if info.role == "trap":
        tripped = round(status.changed * status.fired)
        return f"tripped in {count(tripped, 'step')}" if tripped else "never tripped"
    return "changed nothing" if info.role == "edit" and not status.changed else ""


def _happened(events: Sequence[Event]) -> Iterator[str]:
    """Yield the events in order of time, repeated ones folded into their first."""
    if not events:
        return
    groups: dict[tuple[str, ...], list[Event]] = {}
    for event in events:
        # Notices of no rule in particular have only their wording to be told apart by, but for the
        # numbers in it; the second line of a trap says what was done, so "giving up" stands alone.
        wording = re.sub(r"\d[\d,.]*", "#", "".join(event.message.split("\n", 2)[:2]))
        groups.setdefault((event.kind, event.rule, event.name, wording), []).append(event)
    folded = list(groups.values())
    # The beginning tells what went wrong first, the end what stopped the run.
    early, late = folded[: _EVENTS // 2], folded[_EVENTS // 2 :]
    left_out = late[: -(_EVENTS // 2)]
    yield f"events ({len(events):,})"
    for group in early:
        yield from _entry(group)
    if left_out:
        yield f"  ... and {sum(map(len, left_out)):,} more"
    for group in late[len(left_out) :]:
        yield from _entry(group)


def _entry(group: Sequence[Event]) -> Iterator[str]:
    first = group[0]
    steps = [event.step for event in group]
    head = f"  step {first.step}  {first.kind}"
    head += "".join(f"  {printable(text)}" for text in (first.rule, first.name) if text)
    ranks = sorted({event.rank for event in group})
    if ranks != [0]:
        head += f"  rank {', '.join(map(str, ranks))}"
    if len(group) > 1:
        head += f"  x{len(group):,}, steps {min(steps)}..{max(steps)}"
    yield head
    for line in first.message.split("\n"):
        yield f"      {printable(line)}".rstrip()
