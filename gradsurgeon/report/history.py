"""The l2 norms of a run, read once with numpy: what text, page, screen, notebook and plots show.

A short run is read row by row, so that all numbers are exact. A run of more than `MOST_VALUES` values is read by
the summaries that its writer left, one for every `CHUNK` rows; then the median is that of a sample of rows, and
spikes are searched in the chunks that can hold one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gradsurgeon.report.parts import Flags, Part, is_stored, joined
from gradsurgeon.report.rules_and_events import GRADIENT, STAT
from gradsurgeon.report.spikes import Floats, Ints, Spike, largest_spike
from gradsurgeon.store import Key, WholeSeries
from gradsurgeon.store.layout import CHUNK

MOST_VALUES = 8 * 2**20
# What the optimizer acted on is nearest to `accumulated`, the point that all set-ups have in common.
POINTS = ("accumulated", "step", "backward", "forward")
# At these points each pass, or each call of a module, has a record: a step can have several of one tensor.
_OF_EACH_CALL = frozenset({"backward", "forward"})
_ENDS = 8  # steps at each end of a run that tell how far a norm grew
_TURNS = 4  # so many losses that take turns are no noise
_DEAD = 8  # steps with a norm of 0 at the end of a run that are no accident


class Source(NamedTuple):
    """Which records show a tensor: of which kind, by which rule, at which point."""

    kind: str
    rule: str
    point: str


@dataclass(frozen=True)
class Track:
    """The norms of one tensor. Numbers are over finite values; NaN stands for "none".

    Attributes:
        name: canonical name.
        source: which records these are.
        steps: of each record, or of the first record of each chunk.
        tops: the largest finite norm, NaN where there is none.
        bad: how many norms were not finite.
        there: whether the tensor had a gradient, or a value.
        nonfinite_steps: the first and the last step with a non-finite norm, -1 if there is none.
        first: the first norm.
        median: of all finite norms.
        largest: the largest finite norm.
        last: the last norm.
        spike: the norm that stands out most from the steps before it.
        zero_since: the step from which on all norms are 0 until the end.
        growth: how many times the first norms the last finite ones are.
        rise: how many times the first norms the highest ones are that last a few steps.
        jitter: the median distance of the logarithms of norms of successive steps.
    """

    name: str
    source: Source
    steps: Ints
    tops: Floats
    bad: Ints
    there: Flags
    nonfinite_steps: tuple[int, int]
    first: float
    median: float
    largest: float
    last: float
    spike: Spike | None
    zero_since: int | None
    growth: float
    rise: float
    jitter: float

    @property
    def nonfinite(self) -> int:
        return int(self.bad.sum())

    @property
    def is_zero(self) -> bool:
        return self.largest == 0 and not self.nonfinite

    def cells(self, most: int) -> list[float | None]:
        """Return the history in at most so many cells: the largest norm, NaN for non-finite, `None` for no gradient."""
        number = len(self.steps)
        starts = np.arange(min(most, number)) * number // max(1, min(most, number))
        if not number:
            return []
        tops = np.fmax.reduceat(self.tops, starts)
        bad, there = np.add.reduceat(self.bad, starts), np.logical_or.reduceat(self.there, starts)
        values = np.where(bad > 0, np.nan, tops).tolist()
        return [value if one else None for value, one in zip(values, there.tolist(), strict=True)]


class Whole(NamedTuple):
    """The norm over several tensors together by step, NaN where one of them was not finite.

    Attributes:
        names: the tensors.
        sources: which records these are.
        steps: of each value.
        values: exact, or of a long run the largest that is known of every few steps.
        every: one value stands for so many steps.
    """

    names: tuple[str, ...]
    sources: frozenset[Source]
    steps: Ints
    values: Floats
    every: int


class History:
    """The l2 norms of one run.

    Args:
        series: every series to read, with columns that another one has recorded as well.
        kinds: what each rule measures, such as "gradient" or "output".
        order: names in the order of the model, as far as known.
        pending: returns the number of the update that a series waits for at its end, if it never came.
        rule: read only the records of one rule.
        newest: read only so many of the newest rows of each series.
    """

    def __init__(
        self,
        series: Iterable[tuple[WholeSeries, frozenset[int]]],
        kinds: Mapping[str, str],
        order: Sequence[str] = (),
        *,
        pending: Callable[[WholeSeries], int | None] = lambda _: None,
        rule: str | None = None,
        newest: int | None = None,
    ) -> None:
        every = list(series)
        self.keys = [one.key for one, _ in every]
        norms = [(one, without) for one, without in every if one.key.stat == STAT and len(one)]
        self._kinds, self._rules = kinds, list(kinds)
        self._pending = pending
        names = dict.fromkeys((*order, *chain.from_iterable(one.key.names for one, _ in norms)))
        self._parts = self._read(norms, rule, newest)
        self._by_source = self._tensors()
        self.shown = self._choose(names)
        self.sampled = max((part.every for part in self._parts), default=1)

    def _read(
        self,
        norms: Sequence[tuple[WholeSeries, frozenset[int]]],
        rule: str | None,
        newest: int | None,
    ) -> list[Part]:
        size = sum(len(one) * len(one.key.names) for one, _ in norms)
        exact = newest is not None or size <= MOST_VALUES
        parts = []
        for one, without in norms:
            columns = [column for column in range(len(one.key.names)) if column not in without]
            if columns and rule in (None, one.key.rule):
                is_exact = exact or not is_stored(one)
                pending = self._pending(one)
                parts.append(Part(one, columns, newest=newest, pending=pending, exact=is_exact))
        return parts

    def source_of(self, key: Key) -> Source:
        return Source(self._kinds.get(key.rule, GRADIENT), key.rule, key.point)

    def _tensors(self) -> dict[tuple[Source, str], list[tuple[Part, int]]]:
        found: dict[tuple[Source, str], list[tuple[Part, int]]] = {}
        for part in self._parts:
            source, there = self.source_of(part.series.key), np.asarray(part.there.any(axis=1))
            for name, row in part.row.items():
                if there[row]:
                    found.setdefault((source, name), []).append((part, row))
        return found

    def _choose(self, names: Iterable[str]) -> dict[tuple[str, str], Source]:
        """Return which records are shown, by kind and name: kinds as rules have them, names as in the model."""
        best: dict[tuple[str, str], tuple[tuple[int, int], Source]] = {}
        for source, name in self._by_source:
            points, rules = [*POINTS, source.point], [*self._rules, source.rule]
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
        return {source for source, _ in self._by_source} - set(self.shown.values())

    @cached_property
    def tracks(self) -> list[Track]:
        return [self._track(name, source) for (_, name), source in self.shown.items()]

    def of_kind(self, kind: str) -> list[Track]:
        return [track for track in self.tracks if track.source.kind == kind]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self.shown))

    def _track(self, name: str, source: Source) -> Track:
        parts = self._by_source[source, name]
        is_once = source.point not in _OF_EACH_CALL
        steps, tops, bad, there = joined(parts, once=is_once)
        # Where a step has one record, the later series counts.
        begin, begin_row = min(parts[::-1] if is_once else parts, key=lambda one: _span(one)[0])
        end, end_row = max(parts[::-1], key=lambda one: _span(one)[1])
        finite = tops[~np.isnan(tops)].astype(float)
        usual = finite
        if not parts[0][0].exact:
            sample = np.concatenate([part.sample[row] for part, row in parts])
            usual = sample[np.isfinite(sample)].astype(float)
        return Track(
            name,
            source,
            steps,
            tops,
            bad,
            there,
            nonfinite_steps=_nonfinite_steps(parts, steps, bad),
            first=begin.ends(begin_row)[0],
            median=float(np.median(usual)) if len(usual) else np.nan,
            largest=float(finite.max()) if len(finite) else np.nan,
            last=end.ends(end_row)[1],
            spike=self._spike(parts, steps, tops),
            zero_since=_zero_since(parts, steps, tops, bad, there),
            **_growth(finite, broken=bool(bad[there][-1:].any())),
            jitter=_jitter(usual if len(parts) == 1 else finite),
        )

    @staticmethod
    def _spike(parts: Sequence[tuple[Part, int]], steps: Ints, tops: Floats) -> Spike | None:
        if parts[0][0].exact:
            finite = ~np.isnan(tops)
            return largest_spike(steps[finite], tops[finite])
        found = [part.spike(row) for part, row in parts]
        return max(filter(None, found), key=lambda spike: spike.times, default=None)

    @cached_property
    def gradients(self) -> list[Whole]:
        """The norms of all gradients together."""
        return self.wholes()

    def wholes(self, kind: str = GRADIENT, names: Collection[str] | None = None) -> list[Whole]:
        """Return the norms of tensors together, for those whose norms add up: of one point, in the same steps.

        A sum over whatever a step happens to have would rise and fall with the rules that are due.
        """
        groups: dict[tuple[object, ...], list[tuple[Part, list[int]]]] = {}
        for part in self._parts:
            source = self.source_of(part.series.key)
            rows = [
                row
                for name, row in part.row.items()
                if self.shown.get((kind, name)) == source and (names is None or name in names)
            ]
            if rows and len(part.steps):
                place = source.point, part.steps.tobytes(), part.exact
                groups.setdefault(place, []).append((part, rows))
        return [self._whole(group) for group in groups.values()]

    def _whole(self, parts: Sequence[tuple[Part, list[int]]]) -> Whole:
        names = tuple(
            part.series.key.names[part.columns[row]] for part, rows in parts for row in rows
        )
        sources = frozenset(self.source_of(part.series.key) for part, _ in parts)
        first = parts[0][0]
        squares, bad = np.zeros(len(first.steps)), np.zeros(len(first.steps), bool)
        there = np.zeros(len(first.steps), bool)
        for part, rows in parts:
            # The largest norm of a chunk is the least that the whole has been in it.
            chosen = part.tops[rows].astype(float)
            squares += (
                np.nansum(np.square(chosen), axis=0)
                if part.exact
                else np.nanmax(np.square(np.nan_to_num(chosen)), axis=0)
            )
            bad |= (part.bad[rows] > 0).any(axis=0)
            there |= part.there[rows].any(axis=0)
        values = np.where(bad, np.nan, np.sqrt(squares))
        if not first.exact:
            values = np.fmax(values, _sampled_wholes(parts, first))
            values[bad] = np.nan
        steps = first.steps[there]
        return Whole(names, sources, steps, values[there], 1 if first.exact else CHUNK)


def _sampled_wholes(parts: Sequence[tuple[Part, list[int]]], first: Part) -> Floats:
    """Return the largest whole norm of the sampled rows of each chunk."""
    squares = sum(
        np.nansum(np.square(part.sample[rows].astype(float)), axis=0) for part, rows in parts
    )
    chunks = np.searchsorted(first.steps, first.sample_steps, side="right") - 1
    found = np.zeros(len(first.steps))
    np.maximum.at(found, chunks, np.sqrt(squares))
    return found


def _span(of: tuple[Part, int]) -> tuple[int, int]:
    """Return the first and the last step of a tensor in one series."""
    part, row = of
    steps = part.steps[part.there[row]]
    return int(steps[0]), int(steps[-1])


def _nonfinite_steps(parts: Sequence[tuple[Part, int]], steps: Ints, bad: Ints) -> tuple[int, int]:
    if not bad.any():
        return -1, -1
    if parts[0][0].exact:
        found = steps[bad > 0]
        return int(found[0]), int(found[-1])
    near = []
    for part, row in parts:
        places = np.flatnonzero(part.bad[row]).tolist()
        for place in {*places[:1], *places[-1:]}:
            of_chunk, values = part.pairs(row, place, place + 1)
            near += of_chunk[~np.isfinite(values)].tolist()
    return min(near, default=-1), max(near, default=-1)


def _zero_since(
    parts: Sequence[tuple[Part, int]], steps: Ints, tops: Floats, bad: Ints, there: Flags
) -> int | None:
    """Return the step from which on a tensor that was alive has only norms of 0, None if it rests now and then."""
    places = np.flatnonzero(there & ((tops != 0) | (bad > 0)))
    if not len(places):
        return None
    if parts[0][0].exact:
        alive = int(places[-1])
        rest = steps[alive + 1 :][there[alive + 1 :]]
        number, used = len(rest), np.flatnonzero((tops[there] != 0) | (bad[there] > 0))
        pauses = np.diff(used, prepend=-1)
    else:
        rest, number, pauses = _rest(parts)
    # An expert that is rarely chosen rests as long between two choices.
    is_dead = number >= max(_DEAD, 3 * int(pauses.max()))
    return int(rest[0]) if len(rest) and is_dead else None


def _rest(parts: Sequence[tuple[Part, int]]) -> tuple[Ints, int, Ints]:
    """Return the steps after the last norm that is not 0, about how many there are, and the pauses before it.

    Of a long run only the rows of two chunks are read.
    """
    ordered = sorted(parts, key=lambda one: _span(one)[0])
    ways = [
        np.flatnonzero((part.tops[row] != 0) & part.there[row] | (part.bad[row] > 0))
        for part, row in ordered
    ]
    last = max(number for number, places in enumerate(ways) if len(places))
    (part, row), places = ordered[last], ways[last]
    alive = int(places[-1])
    near, values = part.pairs(row, alive, alive + 2)
    if not len(used := np.flatnonzero(values != 0)):
        raise part.damaged()
    later = [one.steps[one.there[line]] for one, line in ordered[last + 1 :]]
    rest = np.concatenate([near[used[-1] + 1 :], *later])
    chunks = part.there[row][alive + 2 :].sum() + sum(map(len, later))
    number = len(values) - 1 - int(used[-1]) + CHUNK * int(chunks)
    pauses = np.append(np.diff(used, prepend=-1), CHUNK * (np.diff(places, prepend=-1) - 1))
    return rest, number, pauses


def _growth(finite: Floats, *, broken: bool) -> dict[str, float]:
    """Return `growth` and `rise` of a track, NaN where they say nothing.

    The last norms before a non-finite one may have grown within a step or two; otherwise a single high norm is
    no growth.
    """
    positive = finite[finite > 0]
    few = min(3, len(positive) // 4)
    if not few:
        return {"growth": np.nan, "rise": np.nan}
    begin = np.median(positive[: min(_ENDS, len(positive) // 4)])
    lasting = sliding_window_view(positive, few).min(axis=1)
    end = positive[-few:].max() if broken else lasting[-1]
    return {"growth": float(end / begin), "rise": float(max(end, lasting.max()) / begin)}


def _jitter(values: Floats) -> float:
    """Return the median distance of logarithms of norms a few steps apart, the least of several distances in time.

    Losses that take turns have a different norm in each step, and the same again a few steps later.
    """
    logs = np.log(values[values > 0])
    lags = range(1, min(_TURNS, len(logs) - 1) + 1)
    return min((float(np.median(np.abs(logs[lag:] - logs[:-lag]))) for lag in lags), default=np.nan)
