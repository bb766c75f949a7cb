"""The l2 norms of a run, read once with numpy: what text, page, screen, notebook and plots show.

Of a run with more than `MOST_VALUES` values a few successive rows count as one, by their largest norm. Ends, spikes and
non-finite norms are then looked up in the rows, so that their steps are exact. Medians are those of one row in a few,
and that a norm is 0 is told a few rows late.
"""

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from gradsurgeon.records.store import Key, Part
from gradsurgeon.report.rules_and_events import GRADIENT, OF_UPDATES, STAT, UPDATES
from gradsurgeon.report.sheets import GROWTH, LARGE, Sheet, Squares, joined, numbers_of, read_sheet
from gradsurgeon.report.spikes import Flags, Floats, Ints, Spike

MOST_VALUES = 4 * 2**20
# What the optimizer acted on is nearest to `accumulated`, the point that all set-ups have in common.
POINTS = ("accumulated", "step", "backward", "forward")
# At these points each pass, or each call of a module, has a record: a step can have several of one tensor.
_OF_EACH_CALL = frozenset({"backward", "forward"})
_AT_ONCE = 2**18  # so many values are judged together, as fit into a processor's cache
_DEAD = 8  # steps with a norm of 0 at the end of a run that are no accident


class Source(NamedTuple):
    """Which records show a tensor: of which kind, by which rule, at which point."""

    kind: str
    rule: str
    point: str


@dataclass(frozen=True)
class Track:
    """The norms of one tensor. Numbers are over finite values; NaN stands for "none"."""

    name: str
    source: Source
    steps: Ints  # of each record, or of the first of every few records
    lasts: Ints  # of each record, or of the last of every few records
    tops: Floats  # the largest finite norm, NaN where there is none
    bad: Ints  # how many norms were not finite
    there: Flags  # whether the tensor had a gradient, or a value
    nonfinite_steps: tuple[int, int]  # the first and the last, -1 if there is none
    first: float
    median: float
    largest: float
    last: float
    last_finite: float
    peak: int  # the step of the spike, or of the largest norm if the norms grew
    spike: Spike | None  # none of a tensor whose norms grew
    has_grown: bool  # to norms that no usual training has
    zero_since: int | None  # the step from which on all norms are 0 until the end
    growth: float  # how many times the first norms the last finite ones are
    rise: float  # how many times the first norms the highest ones are that last a few steps
    jitter: float  # the median distance of the logarithms of norms of successive steps

    @property
    def nonfinite(self) -> int:
        return int(self.bad.sum())

    def cells(self, most: int) -> list[float | None]:
        """Return the history in at most so many cells: the largest norm, NaN for non-finite, `None` for no gradient."""
        number = len(self.steps)
        starts = np.arange(min(most, number)) * number // min(most, number)
        tops = np.fmax.reduceat(self.tops, starts)
        bad, there = np.add.reduceat(self.bad, starts), np.logical_or.reduceat(self.there, starts)
        values = np.where(bad > 0, np.nan, tops).tolist()
        return [value if one else None for value, one in zip(values, there.tolist(), strict=True)]


class Whole(NamedTuple):
    """The norm of several tensors together by step, NaN where one of them was not finite."""

    names: tuple[str, ...]
    sources: frozenset[Source]
    steps: Ints
    lasts: Ints  # the same
    tops: Floats
    bad: Ints
    there: Flags  # always


class History:
    """The l2 norms of one run, read from series, each with columns that another one has recorded as well."""

    def __init__(
        self,
        series: Iterable[tuple[Part, frozenset[int]]],
        kinds: Mapping[str, str],
        order: Sequence[str] = (),
        *,
        rule: str | None = None,
    ) -> None:
        every = list(series)
        self.keys = [one.key for one, _ in every]
        self._kinds = kinds
        norms = [(one, without) for one, without in every if self._is_shown(one.key) and len(one)]
        self._sheets: list[tuple[Source, Sheet, Squares]] = []
        self._places: dict[tuple[Source, str], list[tuple[int, int]]] = {}
        size = sum(len(one) * len(one.key.names) for one, _ in norms)
        self.sampled = 1  # the medians are those of one row in so many
        rows = max(1, -(-size // MOST_VALUES))  # a session in memory never has so many
        for one, without in norms:
            if rule in (None, one.key.rule):
                self._read(one, without, min(rows, len(one)))
        names = dict.fromkeys((*order, *chain.from_iterable(one.key.names for one, _ in norms)))
        # Which records are shown, by kind and name: kinds as rules have them, names as in the model.
        self.shown = self._choose(names)

    def _read(self, series: Part, without: Collection[int], every: int) -> None:
        columns = [column for column in range(len(series.key.names)) if column not in without]
        sheet, squares = read_sheet(series, columns, every)
        source = self.source_of(series.key)
        for line in np.flatnonzero(sheet.there.any(axis=1)).tolist():
            place = len(self._sheets), line
            self._places.setdefault((source, sheet.names[line]), []).append(place)
        self._sheets.append((source, sheet, squares))
        self.sampled = max(self.sampled, every)

    def _is_shown(self, key: Key) -> bool:
        is_of_update = self._kinds.get(key.rule) == UPDATES and key.stat in OF_UPDATES
        return key.stat == STAT or is_of_update

    def source_of(self, key: Key) -> Source:
        kind = OF_UPDATES.get(key.stat) or self._kinds.get(key.rule, GRADIENT)
        return Source(kind, key.rule, key.point)

    def _choose(self, names: Iterable[str]) -> dict[tuple[str, str], Source]:
        best: dict[tuple[str, str], tuple[tuple[int, int], Source]] = {}
        for source, name in self._places:
            points, rules = [*POINTS, source.point], [*self._kinds, source.rule]
            rank = points.index(source.point), rules.index(source.rule)
            known = best.get((source.kind, name))
            if known is None or rank < known[0]:
                best[source.kind, name] = rank, source
        place = {name: number for number, name in enumerate(names)}
        kinds = list(dict.fromkeys((*self._kinds.values(), *(kind for kind, _ in best))))
        ordered = sorted(best, key=lambda pair: (kinds.index(pair[0]), place[pair[1]]))
        return {pair: best[pair][1] for pair in ordered}

    @property
    def hidden(self) -> set[Source]:
        """Records of l2 norms that are not shown, because others of the same kind are."""
        return {source for source, _ in self._places} - set(self.shown.values())

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self.shown))

    def of_kind(self, kind: str) -> list[Track]:
        return [track for track in self.tracks if track.source.kind == kind]

    @cached_property
    def tracks(self) -> list[Track]:
        # Tensors that lie in the same series are read and judged together.
        groups: dict[tuple[object, ...], list[list[tuple[int, int]]]] = {}
        for (_, name), source in self.shown.items():
            places = self._places[source, name]
            groups.setdefault((source, *(sheet for sheet, _ in places)), []).append(places)
        found = {}
        for group in groups.values():
            sheets = [self._sheets[number] for number, _ in group[0]]
            source = sheets[0][0]
            lines = [[line for _, line in places] for places in zip(*group, strict=True)]
            parts = [(sheet, some) for (_, sheet, _), some in zip(sheets, lines, strict=True)]
            for sheet in joined(parts, once=source.point not in _OF_EACH_CALL):
                found.update({(source.kind, one.name): one for one in _tracks_of(sheet, source)})
        return [found[pair] for pair in self.shown]

    @cached_property
    def gradients(self) -> list[Whole]:
        return self.wholes()

    def wholes(self, kind: str = GRADIENT, names: Collection[str] | None = None) -> list[Whole]:
        """Return the norms of tensors together, for those whose norms add up: of one point, in the same steps."""
        groups: dict[tuple[str, bytes], list[tuple[Source, list[str], Ints, Floats]]] = {}
        for source, sheet, squares_of in self._sheets:
            lines = [
                line
                for line, name in enumerate(sheet.names)
                if self.shown.get((kind, name)) == source and (names is None or name in names)
            ]
            if lines:
                steps, squares = squares_of(lines)
                own, place = [sheet.names[line] for line in lines], (source.point, steps.tobytes())
                found = next((one for one in groups if _keeps_pace(one, place)), place)
                groups.setdefault(found, []).append((source, own, steps, squares))
        return [_whole(group) for group in groups.values()]


def _keeps_pace(one: tuple[str, bytes], other: tuple[str, bytes]) -> bool:
    # One series may have a row that another has yet to get: their optimizers step in turn.
    short, long = sorted((one[1], other[1]), key=len)
    return one[0] == other[0] and len(long) <= len(short) + 8 and long.startswith(short)


def _whole(parts: Sequence[tuple[Source, list[str], Ints, Floats]]) -> Whole:
    sources, names, every_step, squares = zip(*parts, strict=True)
    steps = min(every_step, key=len)
    total, number = np.sum([one[:, : len(steps)] for one in squares], axis=0)
    rows = np.flatnonzero(number)
    order = rows[np.argsort(steps[rows], kind="stable")]
    if sources[0].point not in _OF_EACH_CALL:
        # A run that went back to an earlier state has steps twice, and the later counts.
        order = order[np.diff(steps[order], append=sys.maxsize) > 0]
    steps, total = steps[order], total[order]
    there, bad = np.ones(len(steps), bool), (~np.isfinite(total)).astype(np.int64)
    tops = np.where(bad, np.nan, np.sqrt(total))
    return Whole((*chain(*names),), frozenset(sources), steps, steps, tops, bad, there)


def _tracks_of(sheet: Sheet, source: Source) -> Iterator[Track]:
    most = max(1, _AT_ONCE // max(1, len(sheet.steps)))
    for start in range(0, len(sheet.names), most):
        lines = slice(start, start + most)
        numbers, spikes = numbers_of(sheet, lines)
        bad, there = sheet.bad[lines], sheet.there[lines]
        ends = there.argmax(axis=1), there.shape[1] - 1 - there[:, ::-1].argmax(axis=1)
        has_bad = np.asarray(bad.any(axis=1))
        # Only of norms that end in zeros it has to be known since when.
        ends_in_zero = np.asarray(sheet.tops[lines][np.arange(len(bad)), ends[1]] == 0)
        for row, name in enumerate(sheet.names[lines]):
            line = start + row
            own = {field: float(column[row]) for field, column in numbers.items()}
            has_grown = own["rise"] >= GROWTH and own["largest"] >= LARGE
            top = (int(np.nanargmax(sheet.tops[line])), 0.0) if has_grown else spikes[row]
            found = top and _spike(sheet, line, *top)
            yield Track(
                name,
                source,
                sheet.steps,
                sheet.lasts,
                sheet.tops[line],
                sheet.bad[line],
                sheet.there[line],
                nonfinite_steps=_nonfinite_steps(sheet, line) if has_bad[row] else (-1, -1),
                first=float(sheet.read(line, int(ends[0][row]))[1][0]),
                last=(last := float(sheet.read(line, int(ends[1][row]))[1][-1])),
                last_finite=last if np.isfinite(last) else _last_finite(sheet, line),
                peak=-1 if found is None else found.step,
                spike=None if has_grown else found,
                has_grown=has_grown,
                zero_since=_zero_since(sheet, line) if ends_in_zero[row] else None,
                **own,
            )


def _spike(sheet: Sheet, line: int, column: int, times: float) -> Spike:
    steps, norms = sheet.read(line, column)
    at = int(np.argmax(np.where(np.isfinite(norms), norms, -1.0)))
    return Spike(int(steps[at]), float(norms[at]), times)


def _last_finite(sheet: Sheet, line: int) -> float:
    columns = np.flatnonzero(~np.isnan(sheet.tops[line])).tolist()
    norms = sheet.read(line, columns[-1])[1] if columns else np.empty(0)
    return float(norms[np.isfinite(norms)][-1]) if columns else math.nan


def _nonfinite_steps(sheet: Sheet, line: int) -> tuple[int, int]:
    columns = np.flatnonzero(sheet.bad[line])[[0, -1]].tolist()
    first, last = (sheet.read(line, column) for column in columns)
    return int(first[0][~np.isfinite(first[1])][0]), int(last[0][~np.isfinite(last[1])][-1])


def _zero_since(sheet: Sheet, line: int) -> int | None:
    columns = np.flatnonzero(sheet.there[line])
    alive = np.flatnonzero((sheet.tops[line, columns] != 0) | (sheet.bad[line, columns] > 0))
    if not len(alive):
        return None
    later = columns[alive[-1] + 1 :]
    # An expert that is rarely chosen rests as long between two choices.
    pause = int(np.diff(alive, prepend=-1).max())
    if len(later) * sheet.every < max(_DEAD, 3 * pause * sheet.every):
        return None
    return int(sheet.steps[later[0]])


class Grid(NamedTuple):
    """Tensors x columns; a column stands for one step or for several, by the largest norm in them."""

    firsts: Ints  # the first step of each column
    lasts: Ints  # the last step that was recorded in it
    tops: Floats
    bad: Ints
    there: Flags
    measured: Flags  # something was measured, be it that there was no gradient
    each: int  # so many steps share a column, at most


def grid_of(tracks: Sequence[Track | Whole], most: int) -> Grid:
    # Many tracks share the array of their steps.
    parts = {id(one.steps): (one.steps, one.lasts) for one in tracks}
    steps, ends = map(np.concatenate, zip(*parts.values(), strict=True))
    every, place = np.unique(steps, return_inverse=True)
    np.maximum.at(until := every.copy(), place, ends)
    width = -(-(int(every[-1]) - int(every[0]) + 1) // most)
    column = (every - every[0]) // width
    used, starts = np.unique(column, return_index=True)
    firsts, lasts = every[starts], np.maximum.reduceat(until, starts)
    shape = len(tracks), len(used)
    tops, bad = np.full(shape, np.nan, np.float64), np.zeros(shape, np.int64)
    there, measured = np.zeros(shape, bool), np.zeros(shape, bool)
    for row, track in enumerate(tracks):
        at = np.searchsorted(used, (track.steps - every[0]) // width)
        begins = np.flatnonzero(np.diff(at, prepend=-1))
        to = at[begins]
        tops[row, to] = np.fmax.reduceat(track.tops, begins)
        bad[row, to] = np.add.reduceat(track.bad, begins)
        there[row, to] = np.logical_or.reduceat(track.there, begins)
        measured[row, to] = True
    each = int(np.diff(np.append(starts, len(every))).max())
    return Grid(firsts, lasts, tops, bad, there, measured, each)
