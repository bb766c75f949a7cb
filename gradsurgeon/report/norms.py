"""The tables of norms: a row for each tensor, one table for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.report.callouts import nouns, remarkable, whole_name
from gradsurgeon.report.history import History, Source, Track, Whole
from gradsurgeon.report.rules_and_events import GRADIENT, OF_UPDATES
from gradsurgeon.report.tables import Table

_ROWS = 40
_NUMBERS = frozenset({2, 3, 4, 5, 6})  # columns of the table
_WORST_ROWS = 5  # kept for the worst of each sort, wherever in the model it is
_MARK = "  <- spike"
_HEAD = ("history", "first", "median", "max", "last", "non-finite")
_CELLS = 80  # of a history, as wide as the widest view


class NormTable(NamedTuple):
    """The norms of one kind of tensors, as every view shows them."""

    kind: str
    tracks: Sequence[Track]
    table: Table


def norm_tables(history: History) -> list[NormTable]:
    """Return one table for each kind of tensors that has norms."""
    special = remarkable(history)
    tables = []
    for kind in history.kinds:
        tracks = history.of_kind(kind)
        table = _table(history, kind, tracks, _selected(tracks, special))
        tables.append(NormTable(kind, tracks, table))
    return tables


def newest_table(history: History, found: NormTable, most: int) -> Table:
    """Return a table with fewer rows, the most urgent first."""
    return _table(history, found.kind, found.tracks, ranked(found.tracks)[:most])


def _table(history: History, kind: str, tracks: Sequence[Track], shown: Sequence[Track]) -> Table:
    sources = {track.source for track in tracks}
    several = len(sources) > 1
    most = max((track.spike.times for track in shown if track.spike), default=0.0)
    rows, notes = [], []
    for track in shown:
        numbers = (track.first, track.median, track.largest, track.last)
        nonfinite = f"{track.nonfinite:,}" if track.nonfinite else "-"
        cells = [printable(track.name), "", *(f"{value:.3g}" for value in numbers), nonfinite]
        rows.append([*cells, printable(track.source.rule)] if several else cells)
    if len(shown) < len(tracks):
        more = len(tracks) - len(shown)
        notes.append(f"and {more:,} more; those that stand out and the largest are shown")
    if hidden := {source for source in history.hidden if source.kind == kind}:
        notes.append(f"recorded as well, not shown: {_named(hidden)}")
    if history.sampled > 1:
        notes.append(f"median: that of one step in {history.sampled:,}; all else is of every step")
    spikiest = next((track for track in shown if track.spike and track.spike.times == most), None)
    return Table(
        f"{_measured(kind, len(tracks))}, recorded by {_named(sources)}",
        [nouns(kind), *_HEAD, *["rule"] * several],
        rows,
        right=_NUMBERS,
        curves=[track.cells(_CELLS) for track in shown],
        levels=["bad" if track.nonfinite else "warning" if track.spike else "" for track in shown],
        marks=[_MARK * (track is spikiest) for track in shown],
        notes=notes,
    )


def _measured(kind: str, number: int) -> str:
    if kind in OF_UPDATES.values():
        return f"{kind}, of {count(number, 'parameter')}"
    return f"norms (l2) of {count(number, 'parameter' if kind == GRADIENT else kind)}"


def _named(sources: set[Source]) -> str:
    named = sorted({(source.rule, source.point) for source in sources})
    return ", ".join(f"{printable(rule)} (at {printable(point)})" for rule, point in named)


def _selected(tracks: Sequence[Track], special: set[str]) -> list[Track]:
    """Return the tensors to show, in the order of the model: what stands out first, then the largest."""
    if len(tracks) <= _ROWS:
        return list(tracks)
    urgent = ranked(tracks)
    # Many non-finite ones must not crowd out the spike before them.
    sorts = (
        [track for track in urgent if track.nonfinite][:_WORST_ROWS],
        sorted((track for track in tracks if track.spike), key=_by_spike)[:_WORST_ROWS],
        [track for track in tracks if track.name in special][: _ROWS // 2],
        [one for one in tracks if one.is_zero or one.zero_since is not None][:_WORST_ROWS],
        urgent,
    )
    chosen = dict.fromkeys(track.name for sort in sorts for track in sort)
    names = set(list(chosen)[:_ROWS])
    return [track for track in tracks if track.name in names]


def ranked(tracks: Sequence[Track]) -> list[Track]:
    """Return tensors with the most urgent first: non-finite, then spikes, then the largest medians."""

    def urgency(track: Track) -> tuple[object, ...]:
        first_bad = track.nonfinite_steps[0]
        is_finite = first_bad < 0
        size = -track.median if track.median > 0 else 0.0
        return is_finite, 0 if is_finite else first_bad, _by_spike(track), size

    return sorted(tracks, key=urgency)


def _by_spike(track: Track) -> float:
    return -track.spike.times if track.spike is not None else 0.0


def labels(wholes: Sequence[Whole], params: int) -> list[str]:
    """Return what to call each of some whole norms: of several, by their first tensors also."""
    several = len(wholes) > 1
    return [f"{whole_name(one, params)}{f': {one.names[0]} ...' * several}" for one in wholes]
