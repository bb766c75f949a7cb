"""The report of a run that is being written, fitted to a terminal, to be drawn again and again. No torch.

Each look opens the files anew and closes them, so ranks may join and the writer finds no reader when it ends the run.
A look reads the newest rows, whatever the length of the run. `printable` keeps every name from steering the terminal.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, is_trip
from gradsurgeon.planning.table import count
from gradsurgeon.report.callouts import whole_name
from gradsurgeon.report.names import cut_inside, shortened
from gradsurgeon.report.norms import newest_table
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import by_kind, edits_of
from gradsurgeon.report.sources import from_run
from gradsurgeon.report.sparkline import sparkline
from gradsurgeon.report.tables import Table
from gradsurgeon.store.run import Run, of_lowest_ranks, open_run

Style = Literal["plain", "head", "bad", "warning", "faint"]

# So many rows of each series are in view; fewer of a very large model, down to what tells a spike.
_ROWS_MOST, _ROWS_LEAST, _VALUES = 256, 32, 2**18
# A run is written once in a second: between two looks in less, no step may have arrived, or many.
_PACE_SECONDS = 10.0
_WORST, _ROWS = 10, 8  # rows of a table of norms, and of another table
_EVENTS = 5  # traps, and as many other events: traps must not hide everything else
_SPARK_WIDTH, _NAME_LEAST = 32, 16
_LEAST_LINES = 3  # of a table: its title, the names of its columns, and a row


class Line(NamedTuple):
    text: str
    style: Style = "plain"


class Snapshot(NamedTuple):
    """A run at one moment.

    Attributes:
        report: of the newest rows.
        pace: steps per second in the last seconds of watching, as text; empty if unknown.
        elapsed: how long the run has gone on, or went on until its last record; empty if unknown.
    """

    report: Report
    pace: str
    elapsed: str

    @property
    def is_running(self) -> bool:
        return self.report.ended is not None and self.report.ended.state == "running"


class LiveRun:
    """A run directory to be read again and again.

    Args:
        path: the directory.
        clock: returns seconds that never run backwards, to measure the pace by.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._steps: deque[tuple[float, int]] = deque()

    def read(self) -> Snapshot:
        """Return the run as it is now.

        Raises:
            RecordError: it is not there, is damaged, or its files are just being made.
            GradSurgeonError: numpy is missing.
        """
        with open_run(self._path, partly=True) as run:
            width = sum(len(one.key.names) for one, _ in of_lowest_ranks(run))
            rows = max(_ROWS_LEAST, min(_ROWS_MOST, _VALUES // max(1, width)))
            report = from_run(run, newest=rows)
            snapshot = Snapshot(report, "", _elapsed(run))
        if snapshot.is_running and report.steps:
            return snapshot._replace(pace=self._pace(report.steps[1]))
        return snapshot

    def _pace(self, step: int) -> str:
        now = self._clock()
        self._steps.append((now, step))
        while now - self._steps[0][0] > _PACE_SECONDS and now - self._steps[1][0] >= _PACE_SECONDS:
            self._steps.popleft()
        begin, first = self._steps[0]
        return f"{(step - first) / (now - begin):.3g} steps/s" if now > begin else ""


def _elapsed(run: Run) -> str:
    with suppress(ValueError, OverflowError, OSError):
        begin = datetime.fromisoformat(str(run.meta.get("created"))).timestamp()
        running = "running" in run.states.values()
        ends = [time.time()] if running else [run.last_write(rank) or begin for rank in run.states]
        return str(timedelta(seconds=int(max(ends) - begin))) if max(ends) >= begin else ""
    return ""


def screen(snapshot: Snapshot, columns: int, rows: int | None = None, hint: str = "") -> list[Line]:
    """Return the lines of a whole screen.

    Args:
        snapshot: the run.
        columns: the width of the terminal; longer lines are cut.
        rows: its height, `None` for as many lines as there are.
        hint: the last line.
    """
    report, norms = snapshot.report, snapshot.report.norms
    tables = [(newest_table(report.history, one, _WORST), _WORST) for one in norms]
    others = [(one, _ROWS) for one in report.tables[len(norms) :]]
    sections = [
        _head(snapshot, columns),
        _events(report),
        (Line(remark, "warning") for remark in report.remarks),
        *(_table(table, columns, most) for table, most in tables),
        _wholes(report),
        *(_table(table, columns, most) for table, most in others),
        [Line(hint, "faint")] * bool(hint),
    ]
    lines = _fitted(list(filter(None, map(list, sections))), rows)
    cut = columns - 1
    return [
        line if len(line.text) <= columns else line._replace(text=line.text[:cut] + "…")
        for line in lines
    ]


def status_line(snapshot: Snapshot) -> str:
    """Return the run in one line, for output that is no terminal."""
    report = snapshot.report
    parts = [_step(snapshot), snapshot.pace]
    wholes, number = report.history.gradients[:1], len(report.params)
    parts += [f"{whole_name(whole, number)} {whole.values[-1]:.3g}" for whole in wholes]
    parts.append(count(by_kind(report.events).total(), "event"))
    if report.events:
        parts.append(f"newest: {_event(report.events[-1], report)}")
    return "  ".join(filter(None, parts))


def ending(snapshot: Snapshot) -> str:
    """Return why there is nothing more to watch."""
    ended = snapshot.report.ended
    return "" if ended is None else "\n".join(ended.lines(snapshot.report.events))


def _fitted(sections: Sequence[list[Line]], rows: int | None) -> list[Line]:
    """Put sections below each other; the longest ones lose lines at their ends until all have a place.

    A very small screen lacks the last sections: headings without anything below them say nothing.
    """
    apart = [line for section in sections for line in (Line(""), *section)][1:]
    if rows is None or len(apart) <= rows:
        return apart
    kept = [len(section) for section in sections]
    while sum(kept) > rows and max(kept) > _LEAST_LINES:
        kept[kept.index(max(kept))] -= 1
    lines: list[Line] = []
    for section, most in zip(sections, kept, strict=True):
        take = min(most, rows - len(lines))
        if take < (min(_LEAST_LINES, len(section)) if lines else 1):
            break
        lines += section[:take]
    return lines


def _head(snapshot: Snapshot, columns: int) -> Iterator[Line]:
    report = snapshot.report
    rest = ", ".join(filter(None, (_step(snapshot), snapshot.pace, snapshot.elapsed)))
    room = max(_NAME_LEAST, columns - len(rest) - 2)
    yield Line(f"{cut_inside(printable(report.title), room)}: {rest}", "head")
    if report.ended is not None:
        level = report.ended.level(report.events)
        style: Style = level if level in ("bad", "warning") else "head"
        yield from (Line(line, style) for line in report.ended.lines(report.events))


def _step(snapshot: Snapshot) -> str:
    if snapshot.report.steps is not None:
        return f"step {snapshot.report.steps[1]}"
    return "no step yet" if snapshot.is_running else "no step was recorded"


def _events(report: Report) -> Iterator[Line]:
    kinds = by_kind(report.events)
    listed = ", ".join(f"{kind} {number:,}" for kind, number in kinds.items())
    yield Line(f"events ({kinds.total():,}){listed and ': '}{listed}", "head")
    edits = edits_of(report.rules)
    # The lowest rank speaks for all that note the same.
    newest = {(e.kind, e.rule, e.step, e.message): e for e in reversed(report.events)}.values()
    for is_bad in (True, False):
        shown = [event for event in newest if is_trip(event, edits) is is_bad][:_EVENTS]
        style: Style = "bad" if is_bad else "plain"
        yield from (Line(f"  {_event(event, report)}", style) for event in shown)


def _event(event: Event, report: Report) -> str:
    several = report.ended is not None and len(report.ended.ranks) > 1
    rank = f"rank {event.rank}" if several else ""
    message = event.message.partition("\n")[0]
    for said in (f"step {event.step}, rule {event.rule}: ", f"step {event.step}: "):
        message = message.removeprefix(said)
    texts = (f"step {event.step}", event.kind, event.rule, event.name, rank, message)
    return "  ".join(printable(text) for text in texts if text)


def _table(table: Table, columns: int, most: int) -> Iterator[Line]:
    """Yield a table with its names shortened to the width of the terminal."""
    shown = table._replace(rows=table.rows[:most], curves=table.curves[:most])
    names = [row[0] for row in shown.rows]
    longest = max(map(len, names), default=0)
    if shown.curves and _excess(shown, columns) > max(0, longest - _NAME_LEAST):
        # Numbers say more than a curve that leaves no place for the names.
        shown = shown._replace(
            head=[table.head[0], *table.head[2:]],
            rows=[[row[0], *row[2:]] for row in shown.rows],
            right=frozenset(place - 1 for place in table.right),
            curves=(),
        )
    short = shortened(names, max(_NAME_LEAST, longest - _excess(shown, columns)))
    rows = [[name, *row[1:]] for name, row in zip(short, shown.rows, strict=True)]
    title, *lines = shown._replace(rows=rows).lines(columns)
    yield Line(title, "head")
    styles: list[Style] = ["faint", *(level or "plain" for level in table.levels)]
    styles += ["plain"] * len(lines)
    yield from (Line(line, style) for line, style in zip(lines, styles, strict=False))
    if len(rows) < len(table.rows):
        yield Line(f"  ... and {len(table.rows) - len(rows):,} more", "faint")


def _excess(table: Table, columns: int) -> int:
    """Return by how much the longest line of a table is longer than the terminal."""
    return max(0, max(map(len, table.lines(columns))) - columns)


def _wholes(report: Report) -> Iterator[Line]:
    for whole in report.history.gradients:
        values, name = whole.values.tolist(), whole_name(whole, len(report.params))
        style: Style = "head" if math.isfinite(values[-1]) else "bad"
        curve = sparkline(values, _SPARK_WIDTH)
        yield Line(f"{name}: {values[-1]:.3g} at step {whole.steps[-1]}  {curve}", style)
