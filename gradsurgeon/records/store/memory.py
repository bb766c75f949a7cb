"""Measurements in memory, and records by the name of a tensor.

A *series* holds the values of one rule and one statistic over tensors that share a counter: a row per step,
with one float32 per tensor. A tensor without a gradient in that step has no value in the row, not NaN.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple, TypeVar

from gradsurgeon.errors import RecordError
from gradsurgeon.records.store.layout import Stored, is_present
from gradsurgeon.tensors.statistics import HISTOGRAM, columns_of

# At these points each pass, or each call of a module, has a record: a step can have several of one tensor.
_OF_EACH_CALL = frozenset({"backward", "forward"})
# With 500 parameters this keeps 30,000 steps, enough for a debugging session. Longer runs have a run directory.
MEMORY_LIMIT = 64 * 2**20
_FLOAT = struct.Struct("f").unpack_from
# Python needs so many bytes for a row besides its values.
_ROW_BYTES = 160
Answer = TypeVar("Answer")
# Pairs of a step and a value, oldest first.
Points = list[tuple[int, float]]
_NEAREST = 3
# Statistics of an update as a whole, which rules record beside norms: its loss, and the learning rates of its optimizer.
LOSS = "loss"
RATE = "lr"
NOTHING_RECORDED = 'nothing: a rule {id: norms, action: norm-log, params: "*"} records norms'


class Key(NamedTuple):
    rule: str
    stat: str
    point: str
    names: tuple[str, ...]


class RecordedRow(NamedTuple):
    key: Key
    step: int
    values: bytes
    absent: bytes | None = None
    # A later row of the same step may replace it.
    replace: bool = False


class WholeSeries(ABC):
    rank = 0  # the rank that recorded it

    def __init__(self, key: Key) -> None:
        self.key = key
        self.columns = {name: column for column, name in enumerate(key.names)}

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Stored]:
        """Yield of each row: step, values as bytes of float32, and bits of the absent columns."""

    def ends(self) -> tuple[int, ...]:
        """Return the steps of the first and of the last row, nothing if there are no rows."""
        rows = [*self.stored(0, 1), *self.stored(max(0, len(self) - 1))]
        return tuple([row[0] for row in rows])

    def values_of(self, name: str, start: int = 0) -> Points:
        """Return ``(step, value)`` of one tensor in all rows from ``start`` on, oldest first."""
        column = self.columns[name]
        points = []
        for step, values, absent in self.stored(start):
            if is_present(absent, column):
                (value,) = _FLOAT(values, 4 * column)
                points.append((step, value))
        return points

    def last(self, name: str) -> Points:
        """Return ``(step, value)`` of the newest row with a value of one tensor, nothing if there is none."""
        # The last row most often has a value, and callers ask again and again.
        newest = self.values_of(name, max(0, len(self) - 1)) or self.values_of(name)
        return newest[-1:]


class Part(WholeSeries):
    """The rows of a series but for those that a pass has left for an update that never came, or the `newest` of these.

    `pending` has the number of the next update of each parameter.
    """

    def __init__(
        self, series: WholeSeries, pending: Mapping[str, int], newest: int | None = None
    ) -> None:
        super().__init__(series.key)
        self.whole = series
        self.rank = series.rank
        self._end = len(series)
        # The tensors of a series share a counter.
        waits_for = pending.get(next(iter(self.key.names), ""))
        if self.key.point == "accumulated" and self._end > 1 and series.ends()[-1] == waits_for:
            self._end -= 1
        self.skipped = max(0, self._end - (newest or self._end))

    def __len__(self) -> int:
        return self._end - self.skipped

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Stored]:
        end = self._end
        if stop is not None:
            end = min(end, self.skipped + stop)
        return self.whole.stored(self.skipped + start, end)


AnySeries = TypeVar("AnySeries", bound=WholeSeries)


def matching(
    all_series: Iterable[AnySeries], name: str, stat: str, rule: str | None
) -> list[AnySeries]:
    """Return the series of a tensor, a statistic, and a rule or all rules."""
    matches = []
    for series in all_series:
        measures = series.key.stat == stat and name in series.columns
        if measures and rule in (None, series.key.rule):
            matches.append(series)
    return matches


class Series(WholeSeries):
    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.rows = deque[Stored]()

    def __len__(self) -> int:
        return len(self.rows)

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Stored]:
        # A copy: another thread may be training.
        return islice(list(self.rows), start, stop)


class Records:
    """All series of one session in bounded memory: the oldest rows make room for new rows."""

    def __init__(self, limit_bytes: int = MEMORY_LIMIT) -> None:
        self._limit = limit_bytes
        self._series: dict[Key, Series] = {}
        # The series of each row, by age.
        self._order = deque[Series]()
        self._bytes = 0
        self.dropped = 0

    def add_row(self, row: RecordedRow) -> None:
        if row.key not in self._series:
            self._series[row.key] = Series(row.key)
        series = self._series[row.key]
        stored = (row.step, row.values, row.absent)
        if row.replace and series.rows and series.rows[-1][0] == row.step:
            series.rows[-1] = stored
            return
        series.rows.append(stored)
        self._order.append(series)
        self._bytes += _ROW_BYTES + len(row.values)
        while self._bytes > self._limit and len(self._order) > 1:
            _, dropped, _ = self._order.popleft().rows.popleft()
            self._bytes -= _ROW_BYTES + len(dropped)
            self.dropped += 1

    def series(self, name: str, stat: str, rule: str | None = None) -> list[Series]:
        return matching(self, name, stat, rule)

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series.values())

    def __len__(self) -> int:
        return len(self._order)


def merged(series: Sequence[WholeSeries], name: str) -> Points:
    """Return ``(step, value)`` over several series of one rule, in order of step.

    A tensor moves to a new series when another optimizer claims it, or its module is called more often than others.
    """
    pairs = [*chain.from_iterable([part.values_of(name) for part in series])]
    if len(series) < 2:  # noqa: PLR2004 # two are in no order
        return pairs
    pairs.sort(key=itemgetter(0))
    if series[0].key.point in _OF_EACH_CALL:
        return pairs
    return list(dict(pairs).items())


class RecordQueries(ABC):
    """`history` and `latest` of a session or a run, which makes a `Lookup` of its records."""

    @abstractmethod
    def _lookup(self) -> Lookup:
        """Return the records by name. A session waits for the device first."""

    def history(
        self, name: str, stat: str = "l2", *, rule: str | None = None
    ) -> list[tuple[int, float]]:
        """Return ``(step, value)`` pairs of one tensor, oldest first; nothing if no gradient has arrived.

        In a run of several ranks these are the records of the lowest rank that has some. A session waits for the device.
        For a parameter that ranks share (FSDP2, tensor parallel) the call is a collective while the session is on: all
        ranks that share the parameter must call it. Afterwards the lowest of these ranks answers.

        Args:
            name: canonical name or alias.
            stat: the statistic.
            rule: the id of the `norm-log` rule; needed if several rules record the statistic.

        Raises:
            KeyError: there is no such name; the text gives the nearest names.
            RecordError: no rule, or several rules, record it; or another rank did not call within 10 s.
        """

        def answer() -> Points:
            canonical, series = self._lookup().series_of(name, stat, rule)
            return merged(series, canonical)

        return self._asked(name, stat, answer)

    def latest(self, name: str, stat: str = "l2", *, rule: str | None = None) -> float:
        """Return the newest value of `history`, under the same conditions and without reading the rest.

        Args:
            name: canonical name or alias.
            stat: the statistic.
            rule: the id of the `norm-log` rule; needed if several rules record the statistic.

        Raises:
            KeyError: there is no such name; the text gives the nearest names.
            RecordError: no rule, or several rules, record it; nothing is recorded yet; or another rank did not call
                within 10 s.
        """

        def answer() -> float:
            canonical, series = self._lookup().series_of(name, stat, rule)
            # If two series have the same step, the later series wins, as in `merged`.
            newest = sorted(
                chain.from_iterable([part.last(canonical) for part in series]), key=itemgetter(0)
            )
            if not newest:
                raise RecordError(
                    f"{stat} of {canonical} has not been recorded yet: no gradient has arrived"
                )
            return newest[-1][1]

        return self._asked(name, stat, answer)

    def histograms(
        self, name: str, *, rule: str | None = None
    ) -> list[tuple[int, tuple[float, ...]]]:
        """Return ``(step, counts)`` pairs of one tensor, oldest first, under the conditions of `history`.

        The 66 counts are those of the elements in each bin, in the order of values, then zeros, then non-finite elements:
        ``numpy.array([counts for step, counts in run.histograms(NAME)])`` has the shape ``[steps, 66]``.

        Args:
            name: canonical name or alias.
            rule: the id of the `norm-log` rule with ``stats: [histogram]``; needed if there are several.

        Raises:
            KeyError: there is no such name; the text gives the nearest names.
            RecordError: no rule, or several rules, record it; or another rank did not call within 10 s.
        """
        # By step, and by call within the step.
        rows = defaultdict(list)
        for column in HISTOGRAM:
            calls = Counter[int]()
            for step, number in self.history(name, column, rule=rule):
                rows[step, calls[step]].append(number)
                calls[step] += 1
        # A row of some columns may be gone, as memory is bounded, or has just come.
        complete = []
        for (step, _), counts in sorted(rows.items()):
            if len(counts) == len(HISTOGRAM):
                complete.append((step, tuple(counts)))
        return complete

    def _asked(self, _name: str, _stat: str, answer: Callable[[], Answer]) -> Answer:
        """Return an answer of this process, or of the rank that has the records of a tensor."""
        return answer()


@dataclass(frozen=True, slots=True)
class Lookup:
    known: Collection[str]
    aliases: Mapping[str, str]
    logged: Mapping[str, tuple[Collection[str], Collection[str]]]  # statistics and names, by rule
    # Returns the series of a tensor, a statistic, and a rule or all rules.
    find: Callable[[str, str, str | None], Sequence[WholeSeries]]

    def series_of(
        self, name: str, stat: str, rule: str | None
    ) -> tuple[str, Sequence[WholeSeries]]:
        """Return the canonical name and the series of one rule, possibly none yet."""
        columns = columns_of(stat)
        if len(columns) > 1:
            raise RecordError(
                f"{stat} is {len(columns)} numbers, of which one has a history: {columns[0]} to {columns[-1]}"
            )
        canonical = self.aliases.get(name, name)
        if canonical not in self.known:
            near = get_close_matches(name, [*self.known, *self.aliases], n=_NEAREST, cutoff=0.0)
            listed = ", ".join(near) or "none"
            raise KeyError(f"no parameter {name!r} in the model; nearest: {listed}")
        series = self.find(canonical, stat, rule)
        if not series and stat in (LOSS, RATE) and rule in self.logged:
            # They belong to the training, and are recorded under one rule.
            series = self.find(canonical, stat, None)
        rules = sorted({recorded.key.rule for recorded in series})
        if len(rules) > 1:
            raise RecordError(
                f"{stat} of {canonical} is recorded by several rules: pass rule= one of {', '.join(rules)}"
            )
        if not rules:
            self._check_logged(canonical, stat, rule)
        return canonical, series

    def _check_logged(self, canonical: str, stat: str, rule: str | None) -> None:
        """Raise `RecordError` if no rule is to record a statistic of a tensor."""
        recorded = []
        for rule_id, (stats, names) in self.logged.items():
            if canonical not in names:
                continue
            if stat in stats and rule in (None, rule_id):
                return
            recorded.append(f"{rule_id}: {', '.join(sorted(stats))}")
        subject = "no rule"
        if rule is not None:
            subject = f"no rule {rule!r}"
        listed = "; ".join(recorded) or NOTHING_RECORDED
        raise RecordError(f"{subject} records {stat} of {canonical}; recorded: {listed}")
