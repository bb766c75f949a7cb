"""The report of a running training, fitted to a terminal: at most as many lines as it has, none of them longer.

Every text of the run is written with `printable`, so that no name can steer the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, is_trip
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report.callouts import whole_name
from gradsurgeon.report.history import Track
from gradsurgeon.report.live import Snapshot
from gradsurgeon.report.loss_lines import cosine, pair_cells
from gradsurgeon.report.losses import Combined, Compared
from gradsurgeon.report.norms import NormTable, ranked
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import by_kind, edits_of, rule_lines
from gradsurgeon.report.signed_curve import Curve, means_of
from gradsurgeon.report.sparkline import level_line, sparkline

Style = Literal["plain", "head", "bad", "warning", "faint"]

_CUT = "…"
_RULES, _PAIRS, _WORST = 8, 5, 10
# Traps come first, but must not hide everything else.
_TRAPS, _OTHERS = 5, 5
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
        rows: its height, `None` for as many lines as there are.
        hint: what the last line says, nothing where there is no place for it.
    """
    report = snapshot.report
    sections = [
        list(_head(snapshot, columns)),
        list(_events(report)),
        *(list(_norms(report, table, columns)) for table in report.norms),
        [Line(report.norms_title, "head")] if report.norms_title else [],
        *(list(_compared(one)) for one in report.losses.compared),
        *(list(_combined(one)) for one in report.losses.combined),
        list(_rules(report)),
        [Line(hint, "faint")] if hint else [],
    ]
    lines = _fitted([section for section in sections if section], rows)
    return [Line(cut(line.text, columns), line.style) for line in lines]


def status_line(snapshot: Snapshot) -> str:
    """Return the run in one line, for where there is no terminal."""
    report = snapshot.report
    parts = [_step(report), _pace(snapshot)]
    wholes, number = report.history.wholes()[:1], len(report.params)
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
        if take < min(2, len(section)):
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
    once = {(e.kind, e.rule, e.step, e.message): e for e in report.events}.values()
    newest = list(reversed(list(once)))
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


def _norms(report: Report, found: NormTable, columns: int) -> Iterator[Line]:
    shown = ranked(found.tracks)[:_WORST]
    yield Line(found.title, "head")
    table = [[found.noun, "", "last", "median", "max", ""], *map(_cells, shown)]
    # Each column but the name and the sparkline takes what it needs, with 2 characters before it.
    needed = sum(2 + max(map(len, column)) for column in list(zip(*table, strict=True))[2:])
    longest = max(len(cells[0]) for cells in table)
    width = max(_SPARK_LEAST, min(_SPARK_WIDTH, columns - needed - longest - 4))
    room = max(_NAME_LEAST, columns - needed - width - 4)
    for track, cells in zip(shown, table[1:], strict=True):
        cells[0] = _cut_inside(cells[0], room)
        cells[1] = sparkline(track.cells(width), width)
    styles: list[Style] = ["faint", *map(_style, shown)]
    for text, style in zip(grid(table, right=frozenset({2, 3, 4})), styles, strict=True):
        yield Line(text, style)
    for whole in report.history.wholes(found.kind) if found.kind == "gradient" else ():
        values = whole.values.tolist()
        bad = not math.isfinite(values[-1])
        text = f"  {whole_name(whole, len(report.params))}: {values[-1]:.3g} at step {whole.steps[-1]}  "
        line = sparkline(values, max(_SPARK_LEAST, min(_SPARK_WIDTH, columns - len(text))))
        yield Line(f"{text}{line}", "bad" if bad else "head")


def _cells(track: Track) -> list[str]:
    numbers = (track.last, track.median, track.largest)
    return [printable(track.name), "", *(f"{number:.3g}" for number in numbers), _remark(track)]


def _drift(track: Track) -> float:
    """Return how many decades the last norm is above the median, below 0 for below it."""
    last, usual = track.last, track.median
    if not (math.isfinite(last) and math.isfinite(usual)) or last == usual:
        return 0.0
    if last <= 0 or usual <= 0:
        return math.inf if last > usual else -math.inf
    return math.log10(last / usual)


def _remark(track: Track) -> str:
    spike, decades = track.spike, _drift(track)
    if track.nonfinite:
        return f"{track.nonfinite} non-finite, from {track.nonfinite_steps[0]}"
    if spike is not None:
        return f"spike {spike.times:.3g}x at step {spike.step}"
    if math.isinf(decades):
        return "was 0" if decades > 0 else "now 0"
    return f"{10**decades:.3g}x its median" if abs(decades) >= _DRIFT else ""


def _style(track: Track) -> Style:
    if track.nonfinite:
        return "bad"
    return "warning" if track.spike is not None or abs(_drift(track)) >= _DRIFT else "plain"


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


def _rules(report: Report) -> Iterator[Line]:
    lines = list(rule_lines(report.rules, report.statuses, report.events))
    if not lines:
        return
    title, names, *rules = lines
    yield Line(title, "head")
    yield Line(names, "faint")
    yield from map(Line, rules[:_RULES])
    if len(rules) > _RULES:
        yield Line(f"  ... and {len(rules) - _RULES:,} more", "faint")
