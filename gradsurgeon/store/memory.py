"""Measurements in memory: rows of float32 values, one row per step and statistic.

A *series* is what one rule measures with one statistic over one set of tensors that share a clock. A
row holds one value per tensor; a tensor that had no gradient in that step has no value in the row,
which is not the same as a value of NaN.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradsurgeon.store.layout import pack_absent

# 500 parameters keep 33,000 steps, which is what a memory-only debugging session looks back on;
# longer runs have a run directory.
MEMORY_LIMIT = 64 * 2**20
_VALUE_BYTES = 4
# The step, where the absent columns are, and whose row it is.
_ROW_BYTES = 3 * 8
# Rows that made room stay in the arrays until they are this part of them.
_SLACK = 8


@dataclass(frozen=True, slots=True)
class Key:
    """What identifies a series."""

    rule: str
    stat: str
    point: str
    names: tuple[str, ...]


@dataclass(slots=True)
class Row:
    """The values of one step; ``absent`` holds the columns that have none."""

    step: int
    values: array[float]
    absent: frozenset[int] = frozenset()


class Measured(Protocol):
    """One series, in memory or in a file."""

    @property
    def key(self) -> Key:
        """What identifies it."""

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
        self._steps, self._values = array("q"), array("f")
        self._absent: list[bytes | None] = []
        # So many rows at the beginning have made room.
        self._gone = 0
        # Bytes that the others take.
        self.held = 0

    def __len__(self) -> int:
        return len(self._steps) - self._gone

    def add(
        self, step: int, values: bytes, absent: frozenset[int] = frozenset(), *, replace: bool
    ) -> None:
        """Append a row, or overwrite the last one where it is of the same step."""
        width = len(self.key.names)
        again = replace and len(self) > 0 and self._steps[-1] == step
        if again:
            self.held -= self._size(len(self._steps) - 1)
            self._steps.pop()
            self._absent.pop()
            del self._values[len(self._values) - width :]
        bits = pack_absent(absent, width)
        if len(self) and bits == self._absent[-1]:
            bits = self._absent[-1]  # as a rule the same tensors get no gradient in all steps
        self._steps.append(step)
        self._values.frombytes(values)
        self._absent.append(bits)
        self.held += self._size(len(self._steps) - 1)

    def drop(self) -> None:
        """Let go of the oldest row."""
        self.held -= self._size(self._gone)
        self._absent[self._gone] = None
        self._gone += 1
        if self._gone * _SLACK > len(self._steps):
            del self._values[: self._gone * len(self.key.names)]
            del self._steps[: self._gone], self._absent[: self._gone]
            self._gone = 0

    def _size(self, row: int) -> int:
        """Return how many bytes the first or the last row takes, beside what its neighbour shares."""
        bits = self._absent[row]
        near = row + 1 if row == self._gone else row - 1
        shared = self._gone <= near < len(self._absent) and self._absent[near] is bits
        own = 0 if bits is None or shared else sys.getsizeof(bits)
        return _ROW_BYTES + _VALUE_BYTES * len(self.key.names) + own

    def newest(self) -> int | None:
        """Return the step of the last row, ``None`` where there is none."""
        return self._steps[-1] if len(self) else None

    @property
    def steps(self) -> array[int]:
        """The step of each row."""
        return self._steps[self._gone :]

    def of(self, name: str) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor, oldest first."""
        return [(step, value) for step, value in self.cells(name) if value is not None]

    def cells(self, name: str) -> list[tuple[int, float | None]]:
        """Return step and value of one tensor for every row, ``None`` where it has no value."""
        column, width = self.columns[name], len(self.key.names)
        byte, bit = column >> 3, 1 << (column & 7)
        values = self._values[self._gone * width + column :: width]
        rows = zip(self.steps, values, self._absent[self._gone :], strict=True)
        return [(s, None if bits is not None and bits[byte] & bit else v) for s, v, bits in rows]

    def last(self, name: str) -> tuple[int, float] | None:
        """Return the last ``(step, value)`` of one tensor, ``None`` where there is none."""
        column, width = self.columns[name], len(self.key.names)
        byte, bit = column >> 3, 1 << (column & 7)
        for row in range(len(self._steps) - 1, self._gone - 1, -1):
            bits = self._absent[row]
            if bits is None or not bits[byte] & bit:
                return self._steps[row], self._values[row * width + column]
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
        self._held = 0
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
        rows, held = len(series), series.held
        series.add(step, values, absent, replace=replace)
        self._held += series.held - held
        if len(series) > rows:
            self._order.append(series)
        while self._held > self._limit and len(self._order) > 1:
            oldest = self._order.popleft()
            held = oldest.held
            oldest.drop()
            self._held += oldest.held - held
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


def merged(series: Sequence[Measured], name: str) -> list[tuple[int, float]]:
    """Return ``(step, value)`` over several series of one rule, in order of step.

    A tensor moves on to a new series when another optimizer claims it. Where the point of a rule has
    one record per step, that of the later series stands.
    """
    if len(series) == 1:
        return series[0].of(name)
    pairs = sorted((pair for one in series for pair in one.of(name)), key=lambda pair: pair[0])
    if any(one.key.point == "backward" for one in series):
        return pairs
    return list(dict(pairs).items())
