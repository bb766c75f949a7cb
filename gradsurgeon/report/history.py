"""The l2 norms of a run, read once with numpy: what text, page, screen, notebook and plots show.

Of a run with more than `MOST_VALUES` values a few successive rows count as one, by their largest norm. Medians are then
those of one row in a few, and steps are exact to a few rows.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from gradsurgeon.records.store import Key, Part
from gradsurgeon.report.rules_and_events import GRADIENT, OF_UPDATES, STAT, UPDATES
from gradsurgeon.report.sheets import Sheet, joined, numbers_of, read_sheet
from gradsurgeon.report.spikes import Flags, Floats, Ints, Spike

MOST_VALUES = 16 * 2**20
# What the optimizer acted on is nearest to `accumulated`, the point that all set-ups have in common.
POINTS = ("accumulated", "step", "backward", "forward")
# At these points each pass, or each call of a module, has a record: a step can have several of one tensor.
_OF_EACH_CALL = frozenset({"backward", "forward"})
_AT_ONCE = 2**18  # so many values are judged together, as fit into a processor's cache
_DEAD = 8  # steps with a norm of 0 at the end of a run that are no accident
# An explosion grows so many times, to norms that no usual training has.
_GROWTH, _LARGE = 1e3, 1e2


class RecordOrigin(NamedTuple):
    """Which records show a tensor: of which kind, by which rule, at which point."""

    kind: str
    rule: str
    point: str


@dataclass(frozen=True)
class Track:
    """The norms of one tensor. Numbers are over finite values; NaN stands for "none"."""

    name: str
    origin: RecordOrigin
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
    peak: int  # the step of the largest norm, -1 if there is none
    spike: Spike | None  # none of a tensor whose norms grew
    has_grown: bool  # to norms that no usual training has
    zero_since: int | None  # the step from which on all norms are 0 until the end
    rise: float  # how many times the first norms the highest ones are that last a few steps

    @property
    def nonfinite(self) -> int:
        return int(self.bad.sum())

    def cells(self, most: int) -> list[float | None]:
        """Return the history in at most so many cells: the largest norm, NaN for non-finite, `None` for no gradient."""
        number = len(self.steps)
        starts = np.arange(min(most, number)) * number // min(most, number)
        tops = np.fmax.reduceat(self.tops, starts)
        bad = np.add.reduceat(self.bad, starts)
        there = np.logical_or.reduceat(self.there, starts)
        values: list[float | None] = np.where(bad > 0, np.nan, tops).tolist()
        for cell in np.flatnonzero(~there).tolist():
            values[cell] = None
        return values


class WholeNorm(NamedTuple):
    """The norm of several tensors together by step, NaN where one of them was not finite."""

    names: tuple[str, ...]
    origins: frozenset[RecordOrigin]
    steps: Ints
    lasts: Ints
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
        self.keys = [part.key for part, _ in every]
        self._kinds = kinds
        norms = [
            (part, repeated) for part, repeated in every if self._is_norm(part.key) and len(part)
        ]
        self._sheets: list[tuple[RecordOrigin, Sheet]] = []
        # The sheets and lines in which an origin has a tensor.
        self._places: dict[tuple[RecordOrigin, str], list[tuple[int, int]]] = {}
        size = sum(len(part) * len(part.key.names) for part, _ in norms)
        self.rows_of_a_column = max(1, -(-size // MOST_VALUES))
        for part, repeated in norms:
            if rule in (None, part.key.rule):
                self._read(part, repeated)
        names = dict.fromkeys((*order, *chain.from_iterable(part.key.names for part, _ in norms)))
        # Which records are shown, by kind and name: kinds as rules have them, names as in the model.
        self.shown = self._choose(names)

    def _read(self, series: Part, repeated: Collection[int]) -> None:
        columns = [column for column in range(len(series.key.names)) if column not in repeated]
        sheet = read_sheet(series, columns, self.rows_of_a_column)
        origin = self._origin_of(series.key)
        for line in np.flatnonzero(sheet.there.any(axis=1)).tolist():
            place = len(self._sheets), line
            self._places.setdefault((origin, sheet.names[line]), []).append(place)
        self._sheets.append((origin, sheet))

    def _is_norm(self, key: Key) -> bool:
        is_of_update = self._kinds.get(key.rule) == UPDATES and key.stat in OF_UPDATES
        return key.stat == STAT or is_of_update

    def _origin_of(self, key: Key) -> RecordOrigin:
        kind = OF_UPDATES.get(key.stat) or self._kinds.get(key.rule, GRADIENT)
        return RecordOrigin(kind, key.rule, key.point)

    def _choose(self, names: Iterable[str]) -> dict[tuple[str, str], RecordOrigin]:
        best: dict[tuple[str, str], tuple[tuple[int, int], RecordOrigin]] = {}
        for origin, name in self._places:
            points = [*POINTS, origin.point]
            rules = [*self._kinds, origin.rule]
            rank = points.index(origin.point), rules.index(origin.rule)
            known = best.get((origin.kind, name))
            if known is None or rank < known[0]:
                best[origin.kind, name] = rank, origin
        place = {name: number for number, name in enumerate(names)}
        kinds = list(dict.fromkeys((*self._kinds.values(), *(kind for kind, _ in best))))
        ordered = sorted(best, key=lambda pair: (kinds.index(pair[0]), place[pair[1]]))
        return {pair: best[pair][1] for pair in ordered}

    @property
    def hidden(self) -> set[RecordOrigin]:
        """Records of l2 norms that are not shown, because others of the same kind are."""
        return {origin for origin, _ in self._places} - set(self.shown.values())

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self.shown))

    def tracks_of(self, kind: str) -> list[Track]:
        return [track for track in self.tracks if track.origin.kind == kind]

    @cached_property
    def tracks(self) -> list[Track]:
        # Tensors that lie in the same series are read and judged together.
        groups: dict[tuple[object, ...], list[list[tuple[int, int]]]] = {}
        for (_, name), origin in self.shown.items():
            places = self._places[origin, name]
            groups.setdefault((origin, *(sheet for sheet, _ in places)), []).append(places)
        tracks = {}
        for group in groups.values():
            parts = []
            for same_sheet in zip(*group, strict=True):
                origin, sheet = self._sheets[same_sheet[0][0]]
                parts.append((sheet, [line for _, line in same_sheet]))
            for sheet in joined(parts, once=origin.point not in _OF_EACH_CALL):
                for track in _tracks_of(sheet, origin):
                    tracks[origin.kind, track.name] = track
        return [tracks[pair] for pair in self.shown]

    @cached_property
    def gradients(self) -> list[WholeNorm]:
        return self.wholes()

    def wholes(self, kind: str = GRADIENT) -> list[WholeNorm]:
        """Return the norms of tensors together, for those whose norms add up: of one point, in the same steps."""
        groups: list[list[tuple[RecordOrigin, Sheet, list[int]]]] = []
        for origin, sheet in self._sheets:
            lines = [
                line
                for line, name in enumerate(sheet.names)
                if self.shown.get((kind, name)) == origin
            ]
            if not lines:
                continue
            part = origin, sheet, lines
            group = next((group for group in groups if _adds_up(group[0], part)), None)
            if group is None:
                groups.append([part])
            else:
                group.append(part)
        return [_whole(group) for group in groups]


def _adds_up(
    one: tuple[RecordOrigin, Sheet, list[int]], other: tuple[RecordOrigin, Sheet, list[int]]
) -> bool:
    """Tell whether two parts have the same steps at one point, but for one row that another optimizer has yet to write."""
    length = min(len(one[1].steps), len(other[1].steps))
    longest = max(len(one[1].steps), len(other[1].steps))
    has_same_steps = np.array_equal(one[1].steps[:length], other[1].steps[:length])
    return one[0].point == other[0].point and longest <= length + 1 and has_same_steps


def _whole(parts: Sequence[tuple[RecordOrigin, Sheet, list[int]]]) -> WholeNorm:
    shortest = min((sheet for _, sheet, _ in parts), key=lambda sheet: len(sheet.steps))
    length = len(shortest.steps)
    squares = np.zeros(length)
    bad = np.zeros(length, np.int64)
    there = np.zeros(length, bool)
    names: list[str] = []
    for _, sheet, lines in parts:
        names += [sheet.names[line] for line in lines]
        tops = np.nan_to_num(sheet.tops[lines, :length])
        squares += np.square(tops, dtype=float).sum(axis=0)
        bad += sheet.bad[lines, :length].sum(axis=0)
        there |= sheet.there[lines, :length].any(axis=0)
    point = parts[0][0].point
    order = np.flatnonzero(there)
    order = order[np.argsort(shortest.steps[order], kind="stable")]
    if point not in _OF_EACH_CALL:
        # A run that went back to an earlier state has steps twice, and the later counts.
        order = order[np.diff(shortest.steps[order], append=sys.maxsize) > 0]
    is_bad = bad > 0
    norms = np.where(is_bad, np.nan, np.sqrt(squares))
    return WholeNorm(
        names=tuple(names),
        origins=frozenset(origin for origin, _, _ in parts),
        steps=shortest.steps[order],
        lasts=shortest.lasts[order],
        tops=norms[order],
        bad=is_bad[order].astype(np.int64),
        there=there[order],
    )


def _tracks_of(sheet: Sheet, origin: RecordOrigin) -> Iterator[Track]:
    most = max(1, _AT_ONCE // max(1, len(sheet.steps)))
    for start in range(0, len(sheet.names), most):
        lines = slice(start, start + most)
        numbers, spikes = numbers_of(sheet, lines)
        for row in range(len(spikes)):
            own = {field: float(column[row]) for field, column in numbers.items()}
            yield _track(origin, sheet, start + row, own, spikes[row])


def _track(
    origin: RecordOrigin,
    sheet: Sheet,
    line: int,
    numbers: Mapping[str, float],
    spike: tuple[int, float] | None,
) -> Track:
    tops = sheet.tops[line]
    bad = sheet.bad[line]
    with_value = np.flatnonzero(sheet.there[line])
    finite = np.flatnonzero(~np.isnan(tops))
    broken = np.flatnonzero(bad)
    has_grown = numbers["rise"] >= _GROWTH and numbers["largest"] >= _LARGE
    last = float(sheet.sample[line, with_value[-1]])
    last_finite = last
    if not np.isfinite(last):
        last_finite = float(tops[finite[-1]]) if len(finite) else np.nan
    shown_spike = None
    if spike is not None and not has_grown:
        column, times = spike
        shown_spike = Spike(int(sheet.steps[column]), float(tops[column]), times)
    return Track(
        name=sheet.names[line],
        origin=origin,
        steps=sheet.steps,
        lasts=sheet.lasts,
        tops=tops,
        bad=bad,
        there=sheet.there[line],
        nonfinite_steps=(
            (int(sheet.steps[broken[0]]), int(sheet.lasts[broken[-1]])) if len(broken) else (-1, -1)
        ),
        first=float(sheet.sample[line, with_value[0]]),
        last=last,
        last_finite=last_finite,
        peak=int(sheet.steps[finite[tops[finite].argmax()]]) if len(finite) else -1,
        spike=shown_spike,
        has_grown=has_grown,
        zero_since=_zero_since(sheet, line, with_value),
        **numbers,
    )


def _zero_since(sheet: Sheet, line: int, with_value: Ints) -> int | None:
    is_alive = (sheet.tops[line, with_value] != 0) | (sheet.bad[line, with_value] > 0)
    alive = np.flatnonzero(is_alive)
    if not len(alive) or is_alive[-1]:
        return None
    later = with_value[alive[-1] + 1 :]
    # An expert that is rarely chosen rests as long between two choices.
    pause = int(np.diff(alive, prepend=-1).max())
    if len(later) < max(_DEAD, 3 * pause):
        return None
    return int(sheet.steps[later[0]])


class Grid(NamedTuple):
    """Tensors x columns; a column stands for one step or for several, by the largest norm in them."""

    firsts: Ints  # the first step of each column
    lasts: Ints  # the last step that was recorded in it
    tops: Floats
    bad: Ints
    there: Flags


def grid_of(tracks: Sequence[Track], most: int) -> Grid:
    # Many tracks share the array of their steps.
    parts = {id(track.steps): track for track in tracks}.values()
    begin = min(int(track.steps[0]) for track in parts)
    end = max(int(track.lasts.max()) for track in parts)
    width = -(-(end - begin + 1) // most)
    used = np.unique(np.concatenate([(track.steps - begin) // width for track in parts]))
    firsts = np.full(len(used), end)
    lasts = np.full(len(used), begin)
    for track in parts:
        columns = np.searchsorted(used, (track.steps - begin) // width)
        np.minimum.at(firsts, columns, track.steps)
        np.maximum.at(lasts, columns, track.lasts)
    shape = len(tracks), len(used)
    tops = np.full(shape, np.nan)
    bad = np.zeros(shape, np.int64)
    there = np.zeros(shape, bool)
    for row, track in enumerate(tracks):
        columns = np.searchsorted(used, (track.steps - begin) // width)
        starts = np.flatnonzero(np.diff(columns, prepend=-1))
        to = columns[starts]
        tops[row, to] = np.fmax.reduceat(track.tops, starts)
        bad[row, to] = np.add.reduceat(track.bad, starts)
        there[row, to] = np.logical_or.reduceat(track.there, starts)
    return Grid(firsts, lasts, tops, bad, there)
