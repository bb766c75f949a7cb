"""Measurements in memory: rows of float32 values, one row per step and statistic.

A *series* holds the values of one rule and one statistic over one set of tensors that share a counter. A
row has one value per tensor. A tensor without a gradient in that step has no value in the row, which is
not the same as a value of NaN.
"""

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

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


class WholeSeries(Protocol):
    """One series, in memory or in a file."""

    key: Key
    columns: dict[str, int]

    def __len__(self) -> int: ...

    def of(self, name: str) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor, oldest first."""

    def last(self, name: str) -> tuple[int, float] | None:
        """Return the last ``(step, value)`` of one tensor, ``None`` if there is none."""

    def ends(self) -> tuple[int, ...]:
        """Return the steps of the first and of the last row, nothing if there are no rows."""

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Stored]:
        """Yield of each row: step, values as bytes of float32, and bits of the absent columns."""


AnySeries = TypeVar("AnySeries", bound=WholeSeries)


def matching(every: Iterable[AnySeries], name: str, stat: str, rule: str | None) -> list[AnySeries]:
    """Return the series that measure a statistic of one tensor, by a rule or by any rule."""
    return [
        series
        for series in every
        if series.key.stat == stat and name in series.columns and rule in (None, series.key.rule)
    ]


class Series:
    def __init__(self, key: Key) -> None:
        self.key = key
        self.columns = {name: column for column, name in enumerate(key.names)}
        self.rows: deque[Stored] = deque()

    def __len__(self) -> int:
        return len(self.rows)

    def ends(self) -> tuple[int, ...]:
        return (self.rows[0][0], self.rows[-1][0]) if self.rows else ()

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Stored]:
        # A copy: another thread may be training.
        return islice(list(self.rows), start, stop)

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.cells(name) if value is not None]

    def last(self, name: str) -> tuple[int, float] | None:
        cells = self.cells(name, backwards=True)
        return next(((step, value) for step, value in cells if value is not None), None)

    def cells(self, name: str, *, backwards: bool = False) -> Iterator[tuple[int, float | None]]:
        column = self.columns[name]
        for step, values, absent in reversed(self.rows) if backwards else self.rows:
            has_value = absent is None or not is_absent(absent, column)
            yield step, _FLOAT(values, 4 * column)[0] if has_value else None


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
