"""The tables of norms, one for each kind of tensors, and where the norms of replicas differ. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.callouts import nouns, whole_name
from gradsurgeon.report.history import POINTS, History, Source, Track, Whole
from gradsurgeon.report.rules_and_events import GRADIENT, OF_UPDATES, STAT
from gradsurgeon.report.tables import Table

if TYPE_CHECKING:
    from gradsurgeon.records.store.rank_file import StoredSeries
    from gradsurgeon.records.store.run import Run

_ROWS = 40
_NUMBERS = frozenset({2, 3, 4, 5, 6})  # columns of the table
_HEAD = ("history", "first", "median", "max", "last", "non-finite")
_CELLS = 80  # of a history, as wide as the widest view
# What DDP has reduced is the same to the last bit; other set-ups reduce in another order on each rank.
_TOLERANCE = 1e-3
# Ranks whose norms were alike in so many rows are replicas.
_ALIKE = 3
_REDUCED = POINTS[:2]


class NormTable(NamedTuple):
    """The norms of one kind of tensors, as every view shows them."""

    kind: str
    tracks: Sequence[Track]
    table: Table


def norm_tables(history: History) -> Iterator[NormTable]:
    for kind in history.kinds:
        tracks = history.of_kind(kind)
        urgent = {track.name for track in ranked(tracks)[:_ROWS]}
        # In the order of the model.
        shown = [track for track in tracks if track.name in urgent]
        yield NormTable(kind, tracks, _table(history, kind, tracks, shown))


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
        few = f"{history.sampled:,}"
        notes.append(
            f"the run is long: the median is that of one step in {few}, and a norm is told to be 0 up to {few} steps "
            "late; all else is of every step"
        )
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
    firsts = (f": {one.names[0]} ..." * (several and len(one.names) > 1) for one in wholes)
    return [f"{whole_name(one, params)}{first}" for one, first in zip(wholes, firsts, strict=True)]


def ranks_that_differ(run: Run, kinds: Mapping[str, str], newest: int | None = None) -> str:
    """Return a sentence on the first step and parameter at which replicas differ, empty if none do.

    Ranks are replicas if `DistributedDataParallel` held the model, or if their norms were alike at first. Others may train
    apart, or a script averages their gradients after the norms were taken.
    """
    lowest: dict[tuple[object, ...], StoredSeries] = {}
    found = []
    for series in run:
        key = series.key
        if key.stat == STAT and key.point in _REDUCED and kinds.get(key.rule) == GRADIENT:
            other = lowest.setdefault(tuple(key), series)
            difference = None if other is series else _first_difference(other, series, newest)
            found += [difference] if difference else []
    if run.meta.get("replicas") is not True:
        found = [one for one in found if one[1] >= _ALIKE]
    return min(found)[2] if found else ""


def _first_difference(
    one: StoredSeries, other: StoredSeries, newest: int | None
) -> tuple[int, int, str] | None:
    """Return the first step at which two ranks differ, how many rows before were alike, and the sentence on it."""
    # Of two ranks that are read while they write, one may have more rows.
    start = 0 if newest is None else max(0, min(len(one), len(other)) - newest)
    alike = 0
    both = zip(blocks(one, start), blocks(other, start), strict=False)
    for (steps, values, present), (steps_2, values_2, present_2) in both:
        length = min(len(steps), len(steps_2))
        if not np.array_equal(steps[:length], steps_2[:length]):
            return None  # the ranks have recorded other steps
        a, b = values[:length], values_2[:length]
        with np.errstate(all="ignore"):
            apart = ~np.isclose(a, b, rtol=_TOLERANCE, atol=0.0, equal_nan=True)
        apart &= present[:length] & present_2[:length]
        if apart.any():
            row, column = (int(place) for place in np.argwhere(apart)[0])
            step, name = int(steps[row]), printable(one.key.names[column])
            norms = f"{a[row, column]:.3g} on rank {one.rank} and {b[row, column]:.3g} on rank {other.rank}"
            since = (
                f"from step {step} on" if alike + row or not start else f"at step {step} or before"
            )
            return step, alike + row, f"ranks differ {since}: the norm of {name} is {norms}"
        alike += length
    return None
