"""The report of a run that is being written, fitted to a terminal, to be drawn again and again. No torch.

Each look opens the files anew and closes them, so ranks may join and the writer finds no reader when it ends the run.
A look reads the newest rows, whatever the length of the run. `printable` keeps every name from steering the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, is_trip
from gradsurgeon.planning.table import count
from gradsurgeon.report.callouts import whole_name
from gradsurgeon.report.norms import newest_table
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import by_kind, edits_of
from gradsurgeon.report.sources import from_run
from gradsurgeon.report.tables import Table, shortened, sparkline
from gradsurgeon.store.run import of_lowest_ranks, open_run

Style = Literal["plain", "head", "bad", "warning", "faint"]

# So many rows of each series are in view; fewer of a very large model, down to what tells a spike.
_ROWS_MOST, _ROWS_LEAST, _VALUES = 256, 32, 2**18
_WORST, _ROWS = 10, 8  # rows of a table of norms, and of another table
_EVENTS = 5  # traps, and as many other events: traps must not hide everything else
_SPARK_WIDTH, _NAME_LEAST = 32, 16
_LEAST_LINES = 3  # of a table: its title, the names of its columns, and a row


class Line(NamedTuple):
    text: str
    style: Style = "plain"


def look(path: Path) -> Report:
    """Return the report of a run as it is now, of its newest rows.

    Raises:
        RecordError: it is not there, is damaged, or its files are just being made.
        GradSurgeonError: numpy is missing.
    """
    with open_run(path) as run:
        width = sum(len(one.key.names) for one, _ in of_lowest_ranks(run))
        rows = max(_ROWS_LEAST, min(_ROWS_MOST, _VALUES // max(1, width)))
        return from_run(run, newest=rows)


def screen(report: Report, columns: int, rows: int | None = None, hint: str = "") -> list[Line]:
    """Return the lines of a whole screen.

    Args:
        report: of the newest rows.
        columns: the width of the terminal; longer lines are cut.
        rows: its height, `None` for as many lines as there are.
        hint: the last line.
    """
    norms = report.norms
    tables = [(newest_table(report.history, one, _WORST), _WORST) for one in norms]
    others = [(one, _ROWS) for one in report.tables[len(norms) :]]
    sections = [
        _head(report, columns),
        _events(report),
        (Line(remark, "warning") for remark in report.remarks),
        *(_table(table, columns, most) for table, most in tables),
        _wholes(report),
        *(_table(table, columns, most) for table, most in others),
        [Line(hint, "faint")] * bool(hint),
    ]
    lines = _fitted(list(filter(None, map(list, sections))), rows)
    return [
        line if len(line.text) <= columns else line._replace(text=f"{line.text[: columns - 1]}…")
        for line in lines
    ]


def status_line(report: Report) -> str:
    """Return the run in one line, for output that is no terminal."""
    parts = [_step(report)]
    wholes, number = report.history.gradients[:1], len(report.params)
    parts += [f"{whole_name(whole, number)} {whole.values[-1]:.3g}" for whole in wholes]
    parts.append(count(by_kind(report.events).total(), "event"))
    parts += [f"newest: {_event(event, report)}" for event in report.events[-1:]]
    return "  ".join(parts)


def _fitted(sections: Sequence[list[Line]], rows: int | None) -> list[Line]:
    """Put sections below each other; the longest ones lose lines at their ends until all have a place.

    A very small screen lacks the last lines.
    """
    apart = [line for section in sections for line in (Line(""), *section)][1:]
    if rows is None or len(apart) <= rows:
        return apart
    kept = [len(section) for section in sections]
    while sum(kept) > rows and max(kept) > _LEAST_LINES:
        kept[kept.index(max(kept))] -= 1
    shown = zip(sections, kept, strict=True)
    return [line for section, most in shown for line in section[:most]][:rows]


def _head(report: Report, columns: int) -> Iterator[Line]:
    step = _step(report)
    title = shortened(printable(report.title), max(_NAME_LEAST, columns - len(step) - 2))
    yield Line(f"{title}: {step}", "head")
    if report.ended is not None:
        level = report.ended.level(report.events)
        style: Style = level if level in ("bad", "warning") else "head"
        yield from (Line(line, style) for line in report.ended.lines(report.events))


def _step(report: Report) -> str:
    return "no step yet" if report.steps is None else f"step {report.steps[1]}"


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
    texts = (f"step {event.step}", event.kind, event.rule, event.name, rank, message)
    return "  ".join(printable(text) for text in texts if text)


def _table(table: Table, columns: int, most: int) -> Iterator[Line]:
    """Yield a table with at most so many rows, and with names that leave room for the numbers."""
    longest = max(_NAME_LEAST, columns // 3)
    rows = [[shortened(row[0], longest), *row[1:]] for row in table.rows[:most]]
    shown = table._replace(rows=rows, curves=table.curves[:most])
    styles: list[Style] = ["head", "faint", *(level or "plain" for level in table.levels)]
    styles += ["plain"] * len(rows)
    yield from (Line(*pair) for pair in zip(shown.lines(columns), styles, strict=False))
    if len(rows) < len(table.rows):
        yield Line(f"  ... and {len(table.rows) - len(rows):,} more", "faint")


def _wholes(report: Report) -> Iterator[Line]:
    for whole in report.history.gradients:
        values, name = whole.values.tolist(), whole_name(whole, len(report.params))
        style: Style = "head" if math.isfinite(values[-1]) else "bad"
        curve = sparkline(values, _SPARK_WIDTH)
        yield Line(f"{name}: {values[-1]:.3g} at step {whole.steps[-1]}  {curve}", style)
