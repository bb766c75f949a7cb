"""The l2 norms of a run, read once with numpy: what text, page, screen, notebook and plots show.

Of a run with more than `MOST_VALUES` values a few successive rows count as one, by their largest norm. Steps are then
exact to a few rows.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gradsurgeon.common._grouping import names_of
from gradsurgeon.records.store import Part
from gradsurgeon.report.rules_and_events import GRADIENT, OF_UPDATES, STAT, UPDATES
from gradsurgeon.report.sheets import NO_NORM, Line, read_lines, records_of
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.report.track import RecordOrigin, Track

MOST_VALUES = 32 * 2**20
# The first point that has records is shown: `accumulated` is nearest to the gradient that the optimizer used.
POINTS = ("accumulated", "step", "backward", "forward")
# At these points each pass, or each call of a module, has a record: a step can have several of one tensor.
OF_EACH_CALL = frozenset({"backward", "forward"})


class WholeNorm(NamedTuple):
    """The norm of several tensors together by step, non-finite where one of them was."""

    names: tuple[str, ...]
    point: str
    steps: Ints
    norms: Floats


class History:
    """The l2 norms of one run, read from series, each with columns that another one has recorded as well."""

    def __init__(
        self,
        series: Iterable[tuple[Part, frozenset[int]]],
        kinds: Mapping[str, str],
        order: Sequence[str] = (),
    ) -> None:
        self._kinds = kinds
        norms = []
        size = 0
        for part, repeated in series:
            is_norm = part.key.stat == STAT
            if part.key.stat in OF_UPDATES:
                is_norm = kinds.get(part.key.rule) == UPDATES
            if is_norm and len(part):
                norms.append((part, repeated))
                size += len(part) * len(part.key.names)
        self.rows_of_a_column = max(1, -(-size // MOST_VALUES))
        self._lines: dict[tuple[RecordOrigin, str], list[Line]] = {}
        for part, repeated in norms:
            self._read(part, repeated)
        # Which records are shown, by kind and name: kinds as rules have them, names as in the model.
        self.shown = self._choose(order)

    def _read(self, series: Part, repeated: Collection[int]) -> None:
        rule, stat, point, _ = series.key
        kind = OF_UPDATES.get(stat, self._kinds.get(rule, GRADIENT))
        origin = RecordOrigin(kind, rule, point)
        for name, line in read_lines(series, repeated, self.rows_of_a_column):
            self._lines.setdefault((origin, name), []).append(line)

    def _choose(self, order: Sequence[str]) -> dict[tuple[str, str], RecordOrigin]:
        """Return the records to show, in the order of rules and of the model: of the first point, by the first rule."""
        rules = list(self._kinds)
        kinds = list(self._kinds.values())
        places = {name: place for place, name in enumerate(order)}

        def position(record: tuple[RecordOrigin, str]) -> tuple[int, ...]:
            (kind, rule, point), name = record
            of_name = places.get(name, len(places))
            return _place(kind, kinds), of_name, _place(point, POINTS), _place(rule, rules)

        shown: dict[tuple[str, str], RecordOrigin] = {}
        for origin, name in sorted(self._lines, key=position):
            shown.setdefault((origin.kind, name), origin)
        return shown

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self.shown))

    def tracks_of(self, kind: str) -> list[Track]:
        return [track for track in self.tracks if track.origin.kind == kind]

    @cached_property
    def tracks(self) -> list[Track]:
        tracks = []
        for (_, name), origin in self.shown.items():
            once = origin.point not in OF_EACH_CALL
            steps, norms = records_of(self._lines[origin, name], once=once)
            tracks.append(Track(name, origin, steps, norms))
        return tracks

    @cached_property
    def gradients(self) -> list[WholeNorm]:
        """The norms of gradients together, for those whose norms add up: of one point, in the same steps."""
        groups: list[list[Track]] = []
        for track in self.tracks_of(GRADIENT):
            # The tensors of a model may have several optimizers.
            for group in groups:
                if _adds_up(group[0], track):
                    group.append(track)
                    break
            else:
                groups.append([track])
        return [_whole(group) for group in groups]


def _place(item: str, ordered: Sequence[str]) -> int:
    """Return the place of an item; others come last."""
    return ordered.index(item) if item in ordered else len(ordered)


def _adds_up(first: Track, second: Track) -> bool:
    """Tell whether two tensors have the same steps at one point, but for one row that another optimizer has yet to write."""
    if first.origin.point != second.origin.point:
        return False
    if first.steps is second.steps:
        return True
    length = min(len(first.steps), len(second.steps))
    longer = max(len(first.steps), len(second.steps))
    return longer <= length + 1 and np.array_equal(first.steps[:length], second.steps[:length])


def _whole(tracks: Sequence[Track]) -> WholeNorm:
    steps = min([track.steps for track in tracks], key=len)
    length = len(steps)
    squares = np.zeros(length)
    has_norm = np.zeros(length, bool)
    for track in tracks:
        norms = track.norms[:length]
        is_there = norms != NO_NORM
        has_norm |= is_there
        squares += np.square(np.where(is_there, norms, 0), dtype=float)
    names = tuple(names_of(tracks))
    return WholeNorm(names, tracks[0].origin.point, steps[has_norm], np.sqrt(squares[has_norm]))


class Grid(NamedTuple):
    """Tensors x columns; a column stands for one step or for several, by the largest norm in them."""

    firsts: Ints  # the first step of each column
    lasts: Ints
    norms: Floats


def grid_of(tracks: Sequence[Track], most: int) -> Grid:
    # Many tracks share the array of their steps.
    steps_by_id = {id(track.steps): track.steps for track in tracks}
    all_steps = np.concatenate(list(steps_by_id.values()))
    begin = int(all_steps.min())
    end = int(all_steps.max())
    width = -(-(end - begin + 1) // most)
    used = np.unique((all_steps - begin) // width)
    norms = np.full((len(tracks), len(used)), NO_NORM)
    starts_by_id = {}
    for shared, steps in steps_by_id.items():
        columns = np.searchsorted(used, (steps - begin) // width)
        starts = np.flatnonzero(np.diff(columns, prepend=-1))
        starts_by_id[shared] = (starts, columns[starts])
    for row, track in enumerate(tracks):
        starts, columns = starts_by_id[id(track.steps)]
        norms[row, columns] = np.maximum.reduceat(track.norms, starts)
    firsts = begin + used * width
    return Grid(firsts, np.minimum(firsts + width - 1, end), norms)
