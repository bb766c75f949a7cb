"""Measurements in memory: rows of float32 values, one row per step and statistic.

A *series* holds the values of one rule and one statistic over one set of tensors that share a counter. A
row has one value per tensor. A tensor without a gradient in that step has no value in the row, which is
not the same as a value of NaN.
"""

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from gradsurgeon.store.layout import Stored, is_absent, pack_absent

# At these points each pass, or each call of a module, has a record: a step can have several of one tensor.
_OF_EACH_CALL = frozenset({"backward", "forward"})
# With 500 parameters this keeps 30,000 steps, enough for a debugging session. Longer runs have a run directory.
MEMORY_LIMIT = 64 * 2**20
_FLOAT = struct.Struct("f").unpack_from
# Python needs so many bytes for a row besides its values.
_ROW_BYTES = 160


class Key(NamedTuple):
    rule: str
    stat: str
    point: str
    names: tuple[str, ...]


class WholeSeries:
    """One series, in memory or in a file."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.columns = {name: column for column, name in enumerate(key.names)}

    def __len__(self) -> int:
        raise NotImplementedError

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Stored]:
        """Yield of each row: step, values as bytes of float32, and bits of the absent columns."""
        raise NotImplementedError

    def ends(self) -> tuple[int, ...]:
        """Return the steps of the first and of the last row, nothing if there are no rows."""
        last = max(0, len(self) - 1)
        return tuple(row[0] for start in (0, last) for row in self.stored(start, start + 1))

    def between(self, name: str, start: int, stop: int) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor in some rows."""
        column = self.columns[name]
        return [
            (step, _FLOAT(values, 4 * column)[0])
            for step, values, absent in self.stored(start, stop)
            if absent is None or not is_absent(absent, column)
        ]

    def of(self, name: str) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor, oldest first."""
        return self.between(name, 0, len(self))

    def last(self, name: str) -> tuple[int, float] | None:
        """Return the last ``(step, value)`` of one tensor, ``None`` if there is none."""
        # The last row most often has a value, and callers ask again and again.
        end, size = len(self), 1
        while end:
            start = max(0, end - size)
            if pairs := self.between(name, start, end):
                return pairs[-1]
            end, size = start, 2 * size
        return None


AnySeries = TypeVar("AnySeries", bound=WholeSeries)


def matching(every: Iterable[AnySeries], name: str, stat: str, rule: str | None) -> list[AnySeries]:
    """Return the series that measure a statistic of one tensor, by a rule or by any rule."""
    return [
        series
        for series in every
        if series.key.stat == stat and name in series.columns and rule in (None, series.key.rule)
    ]


class Series(WholeSeries):
    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.rows: deque[Stored] = deque()

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
        self._order: deque[Series] = deque()
        self._bytes = 0
        self.dropped = 0

    def add(
        self,
        key: Key,
        step: int,
        values: bytes,
        absent: frozenset[int] = frozenset(),
        *,
        replace: bool = False,
    ) -> None:
        """Append a row of float32, one value per name of the key, or replace the last row of the same step."""
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series(key)
        row = step, values, pack_absent(absent, len(key.names))
        if replace and series.rows and series.rows[-1][0] == step:
            series.rows[-1] = row
            return
        series.rows.append(row)
        self._order.append(series)
        self._bytes += _ROW_BYTES + len(values)
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


def merged(series: Sequence[WholeSeries], name: str) -> list[tuple[int, float]]:
    """Return ``(step, value)`` over several series of one rule, in order of step.

    A tensor moves to a new series when another optimizer claims it, or when its module is called more often
    than other modules. If the point of a rule has one record per step, the later series overrides the earlier.
    """
    if len(series) == 1:
        return series[0].of(name)
    pairs = sorted((pair for part in series for pair in part.of(name)), key=lambda pair: pair[0])
    if any(part.key.point in _OF_EACH_CALL for part in series):
        return pairs
    return list(dict(pairs).items())
