"""The tables of norms: a row for each tensor, one table for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.report.callouts import nouns, whole_name
from gradsurgeon.report.history import History, Source, Track, Whole
from gradsurgeon.report.rules_and_events import GRADIENT, OF_UPDATES
from gradsurgeon.report.tables import Table

_ROWS = 40
_NUMBERS = frozenset({2, 3, 4, 5, 6})  # columns of the table
_HEAD = ("history", "first", "median", "max", "last", "non-finite")
_CELLS = 80  # of a history, as wide as the widest view


class NormTable(NamedTuple):
    """The norms of one kind of tensors, as every view shows them."""

    kind: str
    tracks: Sequence[Track]
    table: Table


def norm_tables(history: History) -> list[NormTable]:
    tables = []
    for kind in history.kinds:
        tracks = history.of_kind(kind)
        urgent = {track.name for track in ranked(tracks)[:_ROWS]}
        # In the order of the model.
        shown = [track for track in tracks if track.name in urgent]
        tables.append(NormTable(kind, tracks, _table(history, kind, tracks, shown)))
    return tables


def newest_table(history: History, found: NormTable, most: int) -> Table:
    """Return a table with fewer rows, the most urgent first."""
    return _table(history, found.kind, found.tracks, ranked(found.tracks)[:most])


def _table(history: History, kind: str, tracks: Sequence[Track], shown: Sequence[Track]) -> Table:
    sources = {track.source for track in tracks}
    several = len(sources) > 1
    rows, notes = [], []
    for track in shown:
        numbers = (track.first, track.median, track.largest, track.last)
        nonfinite = f"{track.nonfinite:,}" if track.nonfinite else "-"
        cells = [printable(track.name), "", *(f"{value:.3g}" for value in numbers), nonfinite]
        rows.append([*cells, printable(track.source.rule)] if several else cells)
    if len(shown) < len(tracks):
        more = len(tracks) - len(shown)
        notes.append(
            f"and {more:,} more; those that are not finite, then spikes, then the largest are shown"
        )
    if hidden := {source for source in history.hidden if source.kind == kind}:
        notes.append(f"recorded as well, not shown: {_named(hidden)}")
    if history.sampled > 1:
        notes.append(f"median: that of one step in {history.sampled:,}; all else is of every step")
    return Table(
        f"{_measured(kind, len(tracks))}, recorded by {_named(sources)}",
        [nouns(kind), *_HEAD, *["rule"] * several],
        rows,
        right=_NUMBERS,
        curves=[track.cells(_CELLS) for track in shown],
        levels=["bad" if track.nonfinite else "warning" if track.spike else "" for track in shown],
        notes=notes,
    )


def _measured(kind: str, number: int) -> str:
    if kind in OF_UPDATES.values():
        return f"{kind}, of {count(number, 'parameter')}"
    return f"norms (l2) of {count(number, 'parameter' if kind == GRADIENT else kind)}"


def _named(sources: set[Source]) -> str:
    named = sorted({(source.rule, source.point) for source in sources})
    return ", ".join(f"{printable(rule)} (at {printable(point)})" for rule, point in named)


def ranked(tracks: Sequence[Track]) -> list[Track]:
    """Return tensors with the most urgent first: non-finite, then spikes, then the largest medians."""

    def urgency(track: Track) -> tuple[object, ...]:
        first_bad = track.nonfinite_steps[0]
        times = track.spike.times if track.spike else 0.0
        size = -track.median if track.median > 0 else 0.0
        return first_bad < 0, first_bad, -times, size

    return sorted(tracks, key=urgency)


def labels(wholes: Sequence[Whole], params: int) -> list[str]:
    """Return what to call each of some whole norms: of several, by their first tensors also."""
    several = len(wholes) > 1
    texts = [whole_name(one, params) for one in wholes]
    return [
        f"{text}: {one.names[0]} ..." if several and len(one.names) > 1 else text
        for text, one in zip(texts, wholes, strict=True)
    ]
