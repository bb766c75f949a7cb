"""Measurements in memory: rows of float32 values, one row per step and statistic.

A *series* is what one rule measures with one statistic over one set of tensors that share a clock. A
row holds one value per tensor; a tensor that had no gradient in that step has no value in the row,
which is not the same as a value of NaN.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradsurgeon.store.layout import pack_absent

# 500 parameters keep 32,000 steps, which is what a memory-only debugging session looks back on;
# longer runs have a run directory.
MEMORY_LIMIT = 64 * 2**20
_VALUE_BYTES = 4
# The step, and whose row it is.
_ROW_BYTES = 2 * 8
# Which columns are absent, one bit each.
_WORD_BYTES, _WORD_BITS = 8, 64
# Rows that made room stay in the arrays until they are this part of them.
_SLACK = 8


@dataclass(frozen=True, slots=True)
class Key:
    """What identifies a series."""

    rule: str
    stat: str
    point: str
    names: tuple[str, ...]


class RecordedSeries(Protocol):
    """One series, in memory or in a file."""

    @property
    def key(self) -> Key: ...

    def of(self, name: str) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor, oldest first."""

    def last(self, name: str) -> tuple[int, float] | None:
        """Return the last of them, ``None`` where there is none."""

    def newest(self) -> int | None:
        """Return the step of the last row, whatever has a value in it."""


class Series:
    """The rows of one key, oldest first.

    Numbers of all rows lie one after another: an object for each row would take many times their room.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.columns = {name: column for column, name in enumerate(key.names)}
        self._width = len(key.names)
        self._absent_bytes = _WORD_BYTES * -(-self._width // _WORD_BITS)
        self.row_bytes = _ROW_BYTES + _VALUE_BYTES * self._width + self._absent_bytes
        self._steps, self._values, self._absent = array("q"), array("f"), bytearray()
        # So many rows at the beginning have made room.
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._steps) - self._dropped

    def add(
        self, step: int, values: bytes, absent: frozenset[int] = frozenset(), *, replace: bool
    ) -> bool:
        """Append a row, or overwrite the last one where it is of the same step; return whether there is one more."""
        overwrite = replace and len(self) > 0 and self._steps[-1] == step
        if overwrite:
            self._cut(len(self._steps) - 1, len(self._steps))
        self._steps.append(step)
        self._values.frombytes(values)
        bits = pack_absent(absent, self._width) or b""
        self._absent += bits.ljust(self._absent_bytes, b"\0")
        return not overwrite

    def drop_oldest(self) -> None:
        self._dropped += 1
        if self._dropped * _SLACK > len(self._steps):
            self._cut(0, self._dropped)
            self._dropped = 0

    def _cut(self, start: int, stop: int) -> None:
        del self._steps[start:stop]
        del self._values[start * self._width : stop * self._width]
        del self._absent[start * self._absent_bytes : stop * self._absent_bytes]

    def newest(self) -> int | None:
        return self._steps[-1] if len(self) else None

    @property
    def steps(self) -> array[int]:
        return self._steps[self._dropped :]

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.cells(name) if value is not None]

    def cells(self, name: str) -> list[tuple[int, float | None]]:
        """Return step and value of one tensor for every row, ``None`` where it has no value."""
        column, bit = self.columns[name], 1 << (self.columns[name] & 7)
        values = self._values[self._dropped * self._width + column :: self._width]
        absent = self._absent[
            self._dropped * self._absent_bytes + (column >> 3) :: self._absent_bytes
        ]
        rows = zip(self.steps, values, absent, strict=True)
        return [(step, None if bits & bit else value) for step, value, bits in rows]

    def last(self, name: str) -> tuple[int, float] | None:
        column, bit = self.columns[name], 1 << (self.columns[name] & 7)
        for row in range(len(self._steps) - 1, self._dropped - 1, -1):
            if not self._absent[row * self._absent_bytes + (column >> 3)] & bit:
                return self._steps[row], self._values[row * self._width + column]
        return None


class Records:
    """All series of one session in memory, bounded: the oldest rows make room for new ones.

    Attributes:
        dropped: how many rows have made room.
        on_drop: called with the step then, when the first of them does.
    """

    def __init__(self, limit_bytes: int = MEMORY_LIMIT) -> None:
        self._limit = limit_bytes
        self._series: dict[Key, Series] = {}
        self._named: dict[str, list[Series]] = {}
        # The series of each row, by age.
        self._order: deque[Series] = deque()
        self._bytes = 0
        self.dropped = 0
        self.on_drop: Callable[[int], None] | None = None

    def add(
        self,
        key: Key,
        step: int,
        values: bytes,
        absent: frozenset[int] = frozenset(),
        *,
        replace: bool = False,
    ) -> None:
        """Append one row.

        Args:
            key: the series, created when it is new.
            step: the clock of the tensors concerned.
            values: float32 in native byte order, one per name of the key.
            absent: columns without a value.
            replace: overwrite the last row where it is of the same step.
        """
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series(key)
            for name in series.columns:
                self._named.setdefault(name, []).append(series)
        if series.add(step, values, absent, replace=replace):
            self._order.append(series)
            self._bytes += series.row_bytes
        while self._bytes > self._limit and len(self._order) > 1:
            oldest = self._order.popleft()
            oldest.drop_oldest()
            self._bytes -= oldest.row_bytes
            self.dropped += 1
            if self.dropped == 1 and self.on_drop is not None:
                self.on_drop(step)

    def series(self, name: str, stat: str, rule: str | None = None) -> list[Series]:
        """Return the series that measure one tensor with one statistic, in order of creation."""
        return [
            series
            for series in self._named.get(name, ())
            if series.key.stat == stat and rule in (None, series.key.rule)
        ]

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series.values())

    def __len__(self) -> int:
        return len(self._order)


def merged(series: Sequence[RecordedSeries], name: str) -> list[tuple[int, float]]:
    """Return ``(step, value)`` over several series of one rule, in order of step.

    A tensor moves on to a new series when another optimizer claims it. Where the point of a rule has
    one record per step, that of the later series stands.
    """
    if len(series) == 1:
        return series[0].of(name)
    pairs = sorted((pair for part in series for pair in part.of(name)), key=lambda pair: pair[0])
    if any(part.key.point == "backward" for part in series):
        return pairs
    return list(dict(pairs).items())
