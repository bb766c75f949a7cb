"""The tables of norms, one for each kind of tensors, and where the norms of replicas differ. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.callouts import nouns, whole_name
from gradsurgeon.report.history import POINTS, History, WholeNorm
from gradsurgeon.report.rules_and_events import GRADIENT, OF_UPDATES, STAT
from gradsurgeon.report.tables import Table
from gradsurgeon.report.track import RecordOrigin, Track

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
        tracks = history.tracks_of(kind)
        urgent = {track.name for track in ranked(tracks)[:_ROWS]}
        # In the order of the model.
        shown = [track for track in tracks if track.name in urgent]
        yield NormTable(kind, tracks, _table(history, kind, tracks, shown))


def urgent_table(history: History, norms: NormTable, most: int) -> Table:
    """Return a table with fewer rows, the most urgent first."""
    return _table(history, norms.kind, norms.tracks, ranked(norms.tracks)[:most])


def _table(history: History, kind: str, tracks: Sequence[Track], shown: Sequence[Track]) -> Table:
    origins = {track.origin for track in tracks}
    head = [nouns(kind), *_HEAD]
    if len(origins) > 1:
        head.append("rule")
    rows = []
    for track in shown:
        numbers = (track.first, track.median, track.largest, track.last)
        broken = len(track.nonfinite_steps)
        nonfinite = f"{broken:,}" if broken else "-"
        row = [printable(track.name), "", *(f"{value:.3g}" for value in numbers), nonfinite]
        if len(origins) > 1:
            row.append(printable(track.origin.rule))
        rows.append(row)
    return Table(
        f"{_measured(kind, len(tracks))}, recorded by {_named(origins)}",
        head,
        rows,
        right=_NUMBERS,
        curves=[track.cells(_CELLS) for track in shown],
        notes=list(_notes(history, kind, len(tracks) - len(shown))),
    )


def _notes(history: History, kind: str, more: int) -> Iterator[str]:
    if more:
        yield f"and {more:,} more; those that are not finite, then spikes, then the largest are shown"
    if hidden := {origin for origin in history.hidden if origin.kind == kind}:
        yield f"recorded as well, not shown: {_named(hidden)}"
    if history.rows_of_a_column > 1:
        yield f"the run is long: {history.rows_of_a_column:,} successive steps count as one, by their largest norm"


def _measured(kind: str, number: int) -> str:
    if kind in OF_UPDATES.values():
        return f"{kind}, of {count(number, 'parameter')}"
    return f"norms (l2) of {count(number, 'parameter' if kind == GRADIENT else kind)}"


def _named(origins: Iterable[RecordOrigin]) -> str:
    named = sorted({(origin.rule, origin.point) for origin in origins})
    return ", ".join(f"{printable(rule)} (at {printable(point)})" for rule, point in named)


def ranked(tracks: Sequence[Track]) -> list[Track]:
    """Return tensors with the most urgent first: non-finite, then spikes, then the largest medians."""

    def urgency(track: Track) -> tuple[object, ...]:
        first_nonfinite = track.nonfinite_steps[:1].tolist()
        times = track.spike.times if track.spike else 0.0
        size = -track.median if track.median > 0 else 0.0
        return not first_nonfinite, first_nonfinite, -times, size

    return sorted(tracks, key=urgency)


def labels(wholes: Sequence[WholeNorm], params: int) -> list[str]:
    """Return what to call each of some whole norms: of several, by their first tensors also."""
    names = []
    for whole in wholes:
        name = whole_name(whole, params)
        if len(wholes) > 1 and len(whole.names) > 1:
            name += f": {whole.names[0]} ..."
        names.append(name)
    return names


def ranks_that_differ(
    series: Iterable[Part], kinds: Mapping[str, str], *, are_replicas: bool
) -> str:
    """Return a sentence on the first step and parameter at which replicas differ, empty if none do.

    Ranks are replicas if `DistributedDataParallel` held the model, or if their norms were alike at first. Others may train
    apart, or a script averages their gradients after the norms were taken.
    """
    lowest: dict[tuple[object, ...], Part] = {}
    differences = []
    for part in series:
        key = part.key
        if key.stat != STAT or key.point not in _REDUCED or kinds.get(key.rule) != GRADIENT:
            continue
        other = lowest.setdefault(tuple(key), part)
        if other is part:
            continue
        difference = _first_difference(other, part)
        if difference is not None and (are_replicas or difference[1] >= _ALIKE):
            differences.append(difference)
    return min(differences)[2] if differences else ""


def _first_difference(one: Part, other: Part) -> tuple[int, int, str] | None:
    """Return the first step at which two ranks differ, how many rows before were alike, and the sentence on it."""
    # Of two ranks that are read while they write, one may have more rows.
    start = max(one.skipped, other.skipped)
    alike = 0
    both = zip(blocks(one.whole, start), blocks(other.whole, start), strict=False)
    for (steps, values, present), (other_steps, other_values, other_present) in both:
        length = min(len(steps), len(other_steps))
        if not np.array_equal(steps[:length], other_steps[:length]):
            return None  # the ranks have recorded other steps
        ours = values[:length]
        theirs = other_values[:length]
        with np.errstate(all="ignore"):
            apart = ~np.isclose(ours, theirs, rtol=_TOLERANCE, atol=0.0, equal_nan=True)
        apart &= present[:length] & other_present[:length]
        if apart.any():
            row, column = (int(place) for place in np.argwhere(apart)[0])
            step = int(steps[row])
            name = printable(one.key.names[column])
            norms = f"{ours[row, column]:.3g} on rank {one.rank} and {theirs[row, column]:.3g} on rank {other.rank}"
            since = f"from step {step} on"
            if start and not alike + row:
                since = f"at step {step} or before"
            return step, alike + row, f"ranks differ {since}: the norm of {name} is {norms}"
        alike += length
    return None
