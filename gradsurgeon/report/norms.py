"""The tables of norms: a row for each tensor, one table for each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report.callouts import GRADIENT, nouns, remarkable, whole_name
from gradsurgeon.report.history import History, Source, Track, Whole
from gradsurgeon.report.sparkline import NONFINITE, ZERO, sparkline

_SPARK_WIDTH, _SPARK_LEAST = 32, 8
_ROWS = 40
NORM_NUMBERS = frozenset({2, 3, 4, 5, 6})  # columns of the table
_WORST_ROWS = 5  # kept for the worst of each sort, wherever in the model it is
_MARK = "  <- spike"


class NormTable(NamedTuple):
    """The norms of one kind, as every view shows them.

    Attributes:
        kind: such as "gradient" or "output".
        tracks: every tensor that has norms.
        shown: those of them that are shown: what stands out and the largest, if these are many.
        title: whose norms these are, and what recorded them.
        others: what was recorded as well.
        sampled: the median is that of one step in so many.
    """

    kind: str
    tracks: Sequence[Track]
    shown: Sequence[Track]
    title: str
    others: str
    sampled: int

    @property
    def several(self) -> bool:
        """Whether several rules have recorded what is shown."""
        return len({track.source for track in self.tracks}) > 1

    @property
    def noun(self) -> str:
        return nouns(self.kind)

    @property
    def notes(self) -> list[str]:
        """Return what a reader has to know of the table."""
        notes = []
        if len(self.shown) < len(self.tracks):
            more = len(self.tracks) - len(self.shown)
            notes.append(f"and {more:,} more; those that stand out and the largest are shown")
        if self.others:
            notes.append(f"recorded as well, not shown: {self.others}")
        if self.sampled > 1:
            notes.append(f"median: that of one step in {self.sampled:,}; all else is of every step")
        return notes


def norm_tables(history: History) -> list[NormTable]:
    """Return one table for each kind of tensors that has norms."""
    special = remarkable(history)
    tables = []
    for kind in history.kinds:
        tracks = history.of_kind(kind)
        sources = {track.source for track in tracks}
        noun = "parameter" if kind == GRADIENT else kind
        title = f"norms (l2) of {count(len(tracks), noun)}, recorded by {_named(sources)}"
        hidden = {source for source in history.hidden if source.kind == kind}
        shown = selected(tracks, special)
        tables.append(NormTable(kind, tracks, shown, title, _named(hidden), history.sampled))
    return tables


def nothing_recorded(history: History) -> str:
    recorded = printable(", ".join(sorted({key.stat for key in history.keys})))
    return f"norms: no l2 recorded; recorded: {recorded or 'nothing'}"


def _named(sources: set[Source]) -> str:
    named = sorted({(source.rule, source.point) for source in sources})
    return ", ".join(f"{printable(rule)} (at {printable(point)})" for rule, point in named)


def selected(tracks: Sequence[Track], special: set[str], most: int = _ROWS) -> list[Track]:
    """Return the tensors to show, in the order of the model: what stands out first, then the largest."""
    if len(tracks) <= most:
        return list(tracks)
    # Many non-finite ones must not crowd out the spike before them.
    nonfinite = sorted((t for t in tracks if t.nonfinite), key=lambda t: t.nonfinite_steps)
    sorts = (
        nonfinite[:_WORST_ROWS],
        sorted((t for t in tracks if t.spike), key=_spike)[:_WORST_ROWS],
        [t for t in tracks if t.name in special][: most // 2],
        [t for t in tracks if t.is_zero or t.zero_since is not None][:_WORST_ROWS],
        ranked(tracks),
    )
    chosen = dict.fromkeys(track.name for sort in sorts for track in sort)
    names = set(list(chosen)[:most])
    return [track for track in tracks if track.name in names]


def ranked(tracks: Sequence[Track]) -> list[Track]:
    """Return tensors with the most urgent first: non-finite, then spikes, then the largest medians."""
    return sorted(
        tracks,
        key=lambda track: (
            not track.nonfinite,
            track.nonfinite_steps[0] if track.nonfinite else 0,
            _spike(track),
            -track.median if track.median > 0 else 0.0,
        ),
    )


def _spike(track: Track) -> float:
    return -track.spike.times if track.spike is not None else 0.0


def spikiest(tracks: Sequence[Track]) -> Track | None:
    with_spike = [track for track in tracks if track.spike is not None]
    return min(with_spike, key=_spike) if with_spike else None


def labels(wholes: Sequence[Whole], params: int) -> list[str]:
    """Return what to call each of some whole norms, so that none is called like another."""
    texts = [whole_name(whole, params) for whole in wholes]
    if len(wholes) == 1:
        return texts
    for place, whole in enumerate(wholes):
        rules = ", ".join(f"{rule} at {point}" for _, rule, point in sorted(whole.sources))
        texts[place] += f" ({rules})"
    return [
        f"{text}: {whole.names[0]} ..." if texts.count(text) > 1 else text
        for text, whole in zip(texts, wholes, strict=True)
    ]


def norm_lines(tables: Sequence[NormTable], remarks: Sequence[str], columns: int) -> Iterator[str]:
    for table in tables:
        yield table.title
        yield from _table(table, columns)
        yield from (f"  {'... ' * note.startswith('and')}{note}" for note in table.notes)
        yield ""
    yield f"  log scale per row; {NONFINITE} non-finite norm, {ZERO} norm 0, blank: no gradient"
    yield from (f"  {remark}" for remark in remarks)


def _table(found: NormTable, columns: int) -> Iterator[str]:
    shown, several = found.shown, found.several
    table = [norm_head(found), *(norm_cells(track, several=several) for track in shown)]
    # The sparkline gets the room that is left; names are never cut, because people copy them.
    widths = [2 + max(map(len, column)) for column in zip(*table, strict=True)]
    room = columns - (sum(widths) - widths[1] + 2) - len(_MARK)
    width = max(_SPARK_LEAST, min(_SPARK_WIDTH, room))
    for track, cells in zip(shown, table[1:], strict=True):
        cells[1] = sparkline(track.cells(width), width)
    worst = spikiest(shown)
    marks = ["", *(_MARK if track is worst else "" for track in shown)]
    for line, mark in zip(grid(table, right=NORM_NUMBERS), marks, strict=True):
        yield line + mark


def norm_head(found: NormTable) -> list[str]:
    head = [found.noun, "history", "first", "median", "max", "last", "non-finite", "rule"]
    return head if found.several else head[:-1]


def norm_cells(track: Track, *, several: bool) -> list[str]:
    """Return the cells of a row; each view draws the history itself."""
    numbers = (track.first, track.median, track.largest, track.last)
    nonfinite = f"{track.nonfinite:,}" if track.nonfinite else "-"
    cells = [printable(track.name), "", *(f"{value:.3g}" for value in numbers), nonfinite]
    return [*cells, printable(track.source.rule)] if several else cells
