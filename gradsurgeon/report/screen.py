"""The report of a running training, fitted to a terminal: at most as many lines as it has, none of them longer.

Every text of the run is written with `printable`, so that no name can steer the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, is_trip
from gradsurgeon.planning.table import count
from gradsurgeon.report.callouts import whole_name
from gradsurgeon.report.live import Snapshot
from gradsurgeon.report.norms import newest_table
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import by_kind, edits_of
from gradsurgeon.report.sparkline import sparkline
from gradsurgeon.report.tables import Table

Style = Literal["plain", "head", "bad", "warning", "faint"]

_CUT = "…"
_ROWS, _WORST = 8, 10
# Traps come first, but must not hide everything else.
_TRAPS, _OTHERS = 5, 5
_SPARK_WIDTH = 32
_NAME_LEAST = 16
_LEAST_LINES = 3  # of a table: what it is, the names of its columns, and a row


class Line(NamedTuple):
    text: str
    style: Style = "plain"


def screen(snapshot: Snapshot, columns: int, rows: int | None = None, hint: str = "") -> list[Line]:
    """Return a whole screen.

    Args:
        snapshot: what is to be shown.
        columns: the width of the terminal; longer lines are cut.
        rows: its height, `None` for as many lines as there are.
        hint: what the last line says, nothing where there is no place for it.
    """
    report = snapshot.report
    sections = [
        list(_head(snapshot, columns)),
        list(_events(report)),
        [Line(remark, "warning") for remark in report.remarks],
        *(
            list(_table(newest_table(report.history, one, _WORST), columns, _WORST))
            for one in report.norms
        ),
        list(_wholes(report)),
        *(list(_table(one, columns, _ROWS)) for one in report.tables[len(report.norms) :]),
        [Line(hint, "faint")] if hint else [],
    ]
    lines = _fitted([section for section in sections if section], rows)
    return [Line(cut(line.text, columns), line.style) for line in lines]


def status_line(snapshot: Snapshot) -> str:
    """Return the run in one line, for where there is no terminal."""
    report = snapshot.report
    parts = [_step(report), _pace(snapshot)]
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


def cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: max(0, columns - 1)] + _CUT


def _cut_inside(text: str, columns: int) -> str:
    """Cut a name in its middle: what tells it from others stands at both ends."""
    if len(text) <= columns:
        return text
    end = (columns - 1) // 2
    return text[: columns - 1 - end] + _CUT + text[len(text) - end :]


def _fitted(sections: Sequence[list[Line]], rows: int | None) -> list[Line]:
    """Put sections below each other; what has no place is taken off the end of the longest ones.

    On a very small screen the last sections are left out: headings without anything below them say nothing.
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
    parts = [_step(report), _pace(snapshot), _elapsed(snapshot.elapsed)]
    rest = f": {', '.join(filter(None, parts))}"
    title = _cut_inside(printable(report.title), max(_NAME_LEAST, columns - len(rest)))
    ended = report.ended
    if ended is None:
        yield Line(title + rest, "head")
        return
    level = ended.level(report.events)
    style: Style = "bad" if level == "bad" else "warning" if level == "warning" else "head"
    first, *more = ended.lines(report.events)
    yield Line(title + rest, "head")
    yield Line(first, style)
    yield from (Line(line, style) for line in more)


def _step(report: Report) -> str:
    return "no step yet" if report.steps is None else f"step {report.steps[1]}"


def _pace(snapshot: Snapshot) -> str:
    return "" if snapshot.pace is None else f"{snapshot.pace:.3g} steps/s"


def _elapsed(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < math.inf:
        return ""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"


def _events(report: Report) -> Iterator[Line]:
    kinds = by_kind(report.events)
    listed = ", ".join(f"{kind} {number:,}" for kind, number in kinds.items())
    yield Line(f"events ({kinds.total():,}){listed and ': '}{listed}", "head")
    edits = edits_of(report.rules)
    # The lowest rank speaks for all that note the same.
    once = {(e.kind, e.rule, e.step, e.message): e for e in reversed(report.events)}
    newest = list(once.values())
    traps = [event for event in newest if is_trip(event, edits)][:_TRAPS]
    others = [event for event in newest if not is_trip(event, edits)][:_OTHERS]
    for event in (*traps, *others):
        yield Line(f"  {_event(event, report)}", "bad" if event in traps else "plain")


def _event(event: Event, report: Report) -> str:
    several = report.ended is not None and len(report.ended.ranks) > 1
    rank = f"rank {event.rank}" if several else ""
    message = event.message.partition("\n")[0]
    for said in (f"step {event.step}, rule {event.rule}: ", f"step {event.step}: "):
        message = message.removeprefix(said)
    texts = (f"step {event.step}", event.kind, event.rule, event.name, rank, message)
    return "  ".join(printable(text) for text in texts if text)


def _table(table: Table, columns: int, most: int) -> Iterator[Line]:
    """Yield a table with its names cut to the width of the terminal."""
    shown = table._replace(rows=table.rows[:most], curves=table.curves[:most])
    rows = [list(row) for row in shown.rows]
    longest = max((len(line) for line in shown.lines(columns)), default=0)
    names = max((len(row[0]) for row in rows), default=0)
    room = max(_NAME_LEAST, names - max(0, longest - columns))
    for row in rows:
        row[0] = _cut_inside(row[0], room)
    title, *head = shown._replace(rows=rows).lines(columns)
    yield Line(title, "head")
    yield from (Line(line, "faint") for line in head[:1])
    for line, level in zip_longest(head[1:], table.levels[:most]):
        yield Line(line, level or "plain")
    if len(rows) < len(table.rows):
        yield Line(f"  ... and {len(table.rows) - len(rows):,} more", "faint")


def _wholes(report: Report) -> Iterator[Line]:
    for whole in report.history.gradients:
        values = whole.values.tolist()
        bad = not math.isfinite(values[-1])
        text = (
            f"{whole_name(whole, len(report.params))}: {values[-1]:.3g} at step {whole.steps[-1]}  "
        )
        yield Line(f"{text}{sparkline(values, _SPARK_WIDTH)}", "bad" if bad else "head")
