"""A run as it is right now, as lines for a terminal: at most as many as it has, none of them longer.

Every text of the run is written with `printable`, so that no name can steer the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, is_trip
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report.live import FINISHED, Snapshot, drift
from gradsurgeon.report.loss_lines import cosine, pair_cells
from gradsurgeon.report.losses import Combined, Compared
from gradsurgeon.report.norms import NormRow
from gradsurgeon.report.rules_and_events import edits_of, rule_lines
from gradsurgeon.report.signed_curve import Curve, means_of
from gradsurgeon.report.sparkline import level_line, sparkline

Style = Literal["plain", "head", "bad", "warning", "faint"]

_CUT = "…"
_RULES, _PAIRS = 8, 5
_SPARK_WIDTH, _SPARK_LEAST = 32, 8
_NAME_LEAST = 16
_LEAST_LINES = 3  # of a table: what it is, the names of its columns, and a row
_DRIFT = 1.0  # decades, as for a spike


class Line(NamedTuple):
    text: str
    style: Style = "plain"


def screen(snapshot: Snapshot, columns: int, rows: int | None = None, hint: str = "") -> list[Line]:
    """Return a whole screen.

    Args:
        snapshot: what is to be shown.
        columns: the width of the terminal; longer lines are cut.
        rows: its height, ``None`` for as many lines as there are.
        hint: what the last line says, nothing where there is no place for it.
    """
    sections = [
        [_head(snapshot, columns)],
        list(_events(snapshot)),
        list(_worst(snapshot, columns)),
        list(_total(snapshot, columns)),
        *map(list, _losses(snapshot)),
        list(_rules(snapshot)),
        [Line(hint, "faint")] if hint else [],
    ]
    lines = _fitted([section for section in sections if section], rows)
    return [Line(cut(line.text, columns), line.style) for line in lines]


def status_line(snapshot: Snapshot) -> str:
    """Return the run in one line, for where there is no terminal."""
    parts = [_step(snapshot), _pace(snapshot)]
    if snapshot.total is not None and snapshot.total.history:
        parts.append(f"total norm {snapshot.total.history[-1][1]:.3g}")
    parts.append(count(sum(snapshot.kinds.values()), "event"))
    if snapshot.newest is not None:
        parts.append(f"newest: {_event(snapshot.newest, snapshot.states)}")
    return "  ".join(filter(None, parts))


def ending(snapshot: Snapshot) -> str:
    """Return why there is nothing more to watch."""
    if snapshot.state == FINISHED:
        return "the run has finished"
    stopped = [str(rank) for rank, state in snapshot.states.items() if state != FINISHED]
    who = f"rank {', '.join(stopped)} has" if len(snapshot.states) > 1 else "the run has"
    return f"{who} stopped without being closed: the last second may be missing"


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
        if take < min(2, len(section)):
            break
        lines += section[:take]
    return lines


def _head(snapshot: Snapshot, columns: int) -> Line:
    states = list(snapshot.states.values())
    parts = [snapshot.state]
    if len(states) > 1:
        others = [f"{states.count(s)} {s}" for s in dict.fromkeys(states) if s != snapshot.state]
        parts.append(f"{len(states)} ranks" + (f" ({', '.join(others)})" if others else ""))
    parts += filter(None, (_step(snapshot), _pace(snapshot), _elapsed(snapshot.elapsed)))
    rest = f": {', '.join(parts)}"
    title = _cut_inside(printable(snapshot.title), max(_NAME_LEAST, columns - len(rest)))
    return Line(title + rest, "head")


def _step(snapshot: Snapshot) -> str:
    return "no step yet" if snapshot.step is None else f"step {snapshot.step}"


def _pace(snapshot: Snapshot) -> str:
    return "" if snapshot.pace is None else f"{snapshot.pace:.3g} steps/s"


def _elapsed(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < math.inf:
        return ""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"


def _events(snapshot: Snapshot) -> Iterator[Line]:
    kinds = ", ".join(f"{kind} {number:,}" for kind, number in snapshot.kinds.items())
    yield Line(f"events ({sum(snapshot.kinds.values()):,}){kinds and ': '}{kinds}", "head")
    for event in snapshot.events:
        style: Style = "bad" if is_trip(event, edits_of(snapshot.rules)) else "plain"
        yield Line(f"  {_event(event, snapshot.states)}", style)


def _event(event: Event, ranks: Mapping[int, str]) -> str:
    rank = f"rank {event.rank}" if len(ranks) > 1 else ""
    message = event.message.partition("\n")[0]
    for said in (f"step {event.step}, rule {event.rule}: ", f"step {event.step}: "):
        message = message.removeprefix(said)
    texts = (f"step {event.step}", event.kind, event.rule, event.name, rank, message)
    return "  ".join(printable(text) for text in texts if text)


def _worst(snapshot: Snapshot, columns: int) -> Iterator[Line]:
    number, noun = snapshot.measured
    if not number and snapshot.of_losses.stats:
        return  # nobody asked for norms
    if not number or snapshot.span is None:
        yield Line("norms: no l2 recorded yet", "head")
        return
    first, last = snapshot.span
    yield Line(f"worst norms (l2) of {count(number, noun)}, in steps {first}..{last}", "head")
    table = [[noun, "", "last", "median", "max", ""], *map(_cells, snapshot.worst)]
    # Each column but the name and the sparkline takes what it needs, with 2 characters before it.
    needed = sum(2 + max(map(len, column)) for column in list(zip(*table, strict=True))[2:])
    longest = max(len(cells[0]) for cells in table)
    width = max(_SPARK_LEAST, min(_SPARK_WIDTH, columns - needed - longest - 4))
    room = max(_NAME_LEAST, columns - needed - width - 4)
    for row, cells in zip(snapshot.worst, table[1:], strict=True):
        cells[0] = _cut_inside(cells[0], room)
        cells[1] = sparkline(row.history.norms, width)
    styles: list[Style] = ["faint", *map(_style, snapshot.worst)]
    for text, style in zip(grid(table, right=frozenset({2, 3, 4})), styles, strict=True):
        yield Line(text, style)


def _cells(row: NormRow) -> list[str]:
    history = row.history
    numbers = (history.last, history.median, history.largest)
    return [printable(row.name), "", *(f"{number:.3g}" for number in numbers), _remark(row)]


def _remark(row: NormRow) -> str:
    history, spike, decades = row.history, row.history.spike, drift(row)
    if history.nonfinite:
        return f"{history.nonfinite} non-finite, from {history.nonfinite_step}"
    if spike is not None:
        times = f" {spike.times:.3g}x" if math.isfinite(spike.times) else ""
        return f"spike{times} at step {spike.step}"
    if math.isinf(decades):
        return "was 0" if decades > 0 else "now 0"
    return f"{10**decades:.3g}x its median" if abs(decades) >= _DRIFT else ""


def _style(row: NormRow) -> Style:
    if row.history.nonfinite:
        return "bad"
    return "warning" if row.times or abs(drift(row)) >= _DRIFT else "plain"


def _total(snapshot: Snapshot, columns: int) -> Iterator[Line]:
    total = snapshot.total
    if total is None or not total.history:
        return
    values = [value for _, value in total.history]
    noun = snapshot.measured[1]
    of = f"{count(len(total.names), noun)}, {printable(total.rule)} at {printable(total.point)}"
    text = f"total norm {values[-1]:.3g} at step {total.history[-1][0]}  "
    width = max(_SPARK_LEAST, min(_SPARK_WIDTH, columns - len(text) - len(of) - 2))
    bad = not math.isfinite(values[-1])
    yield Line(f"{text}{sparkline(values, width)}  {of}", "bad" if bad else "head")


def _losses(snapshot: Snapshot) -> Iterator[Iterator[Line]]:
    """Yield the sections on several losses: those that conflict most in the newest calls."""
    for compared in snapshot.of_losses.compared:
        yield _compared(compared)
    for combined in snapshot.of_losses.combined:
        yield _combined(combined)


def _compared(found: Compared) -> Iterator[Line]:
    first, last = found.steps
    yield Line(f"worst cosines of losses, {printable(found.rule)} in steps {first}..{last}", "head")
    shown = found.worst()[:_PAIRS]
    table = [["losses", "", "last", "mean", "< 0"]]
    for one in shown:
        name, _, mean, _, below, *_ = pair_cells(one)
        now = cosine(one.curve[-1][1]) if one.curve else "-"
        table.append([name, _signed(one.curve, -1.0, 1.0), now, mean, below])
    styles: list[Style] = ["faint", *("warning" if one.cosine < 0 else "plain" for one in shown)]
    for text, style in zip(grid(table, right=frozenset({2, 3, 4})), styles, strict=True):
        yield Line(text, style)
    if len(shown) < len(found.pairs):
        yield Line(f"  ... and {len(found.pairs) - len(shown):,} more", "faint")


def _combined(found: Combined) -> Iterator[Line]:
    first, last = found.steps
    yield Line(f"weights of losses, {printable(found.rule)} in steps {first}..{last}", "head")
    table = [["loss", "", "last", "mean"]]
    for one in found.weights[:_PAIRS]:
        drawn = _signed(one.curve, min(0.0, one.least), max(1.0, one.largest))
        numbers = (f"{value:.3g}" for value in (one.curve[-1][1], one.mean))
        table.append([printable(one.name), drawn, *numbers])
    yield from map(Line, grid(table, right=frozenset({2, 3})))
    yield Line(f"  distance from the sum, over its norm: {found.curve[-1][1]:.3g}")


def _signed(curve: Curve, low: float, high: float) -> str:
    return level_line([value for _, value in means_of(curve, _SPARK_WIDTH // 2)], low, high)


def _rules(snapshot: Snapshot) -> Iterator[Line]:
    trips = [event for event in snapshot.events if is_trip(event)]
    lines = list(rule_lines(snapshot.rules, snapshot.statuses, trips))
    if not lines:
        return
    title, names, *rules = lines
    yield Line(title, "head")
    yield Line(names, "faint")
    yield from map(Line, rules[:_RULES])
    if len(rules) > _RULES:
        yield Line(f"  ... and {len(rules) - _RULES:,} more", "faint")
