"""Measurements in memory: rows of float32 values, one row per step and statistic.

A *series* is what one rule measures with one statistic over one set of tensors that share a clock. A
row holds one value per tensor; a tensor that had no gradient in that step has no value in the row,
which is not the same as a value of NaN.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

# About 16 M values. 500 parameters keep 33,000 steps, which is what a memory-only debugging session
# looks back on; longer runs have a run directory.
MEMORY_LIMIT = 64 * 2**20
_VALUE_BYTES = 4


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


@dataclass(slots=True)
class Series:
    """The rows of one key, oldest first."""

    key: Key
    rows: deque[Row]
    columns: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = {name: column for column, name in enumerate(self.key.names)}

    def of(self, name: str) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor, oldest first."""
        column = self.columns[name]
        return [(row.step, row.values[column]) for row in self.rows if column not in row.absent]

    def last(self, name: str) -> tuple[int, float] | None:
        """Return the last ``(step, value)`` of one tensor, ``None`` where there is none."""
        column = self.columns[name]
        rows = (row for row in reversed(self.rows) if column not in row.absent)
        return next(((row.step, row.values[column]) for row in rows), None)


class Records:
    """All series of one session in memory, bounded: the oldest rows make room for new ones."""

    def __init__(self, limit_bytes: int = MEMORY_LIMIT) -> None:
        self._limit = limit_bytes
        self._series: dict[Key, Series] = {}
        self._width = 0
        # Rows that each series has room for, and those of the longest one.
        self._room, self._longest = 0, 0
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
            series = self._series[key] = Series(key, deque())
            self._make_room(len(key.names))
        row = Row(step, array("f", values), absent)
        if replace and series.rows and series.rows[-1].step == step:
            series.rows[-1] = row
            return
        series.rows.append(row)
        if len(series.rows) > self._room:
            series.rows.popleft()
            self.dropped += 1
        self._longest = max(self._longest, len(series.rows))

    def _make_room(self, width: int) -> None:
        """Let a new series take its share of the room from those that were there."""
        self._width += width
        self._room = max(16, self._limit // (_VALUE_BYTES * max(1, self._width)))
        # Thousands of series may begin in one step: each module tensor has its own.
        if self._longest <= self._room:
            return
        self._longest = self._room
        for series in self._series.values():
            while len(series.rows) > self._room:
                series.rows.popleft()
                self.dropped += 1

    def series(self, name: str, stat: str, rule: str | None = None) -> list[Series]:
        """Return the series that measure one tensor with one statistic, in order of creation."""
        return [
            series
            for key, series in self._series.items()
            if key.stat == stat and name in series.columns and rule in (None, key.rule)
        ]

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series.values())

    def __len__(self) -> int:
        return sum(len(series.rows) for series in self._series.values())


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
