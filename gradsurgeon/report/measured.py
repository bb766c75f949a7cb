"""What a report reads off measurements, whether they are in memory or on disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from gradsurgeon.report.spikes import Spike, largest
from gradsurgeon.store import Key, Records, merged

STAT = "l2"


@dataclass(frozen=True, slots=True)
class Line:
    """The history of one parameter. The numbers are over its finite values, but first and last.

    Attributes:
        history: the norms, oldest first, or the largest of each few hundred of them.
        first: the first norm.
        middle: the median.
        top: the largest norm.
        spike: the norm that stands out most from those around it, ``None`` where none does.
        last: the last norm.
        nonfinite: how many norms are not finite.
        nonfinite_step: the step of the first of them.
    """

    history: tuple[float | None, ...]
    first: float
    middle: float
    top: float
    spike: Spike | None
    last: float
    nonfinite: int
    nonfinite_step: int


class Measured(Protocol):
    """Measurements of a run."""

    @property
    def dropped(self) -> int:
        """How many rows had to make room."""

    @property
    def sampled(self) -> int:
        """The median is taken over one of so many rows."""

    def keys(self) -> Sequence[Key]:
        """Return the keys of all series."""

    def span(self) -> tuple[int, int] | None:
        """Return the first and the last step, ``None`` where nothing was measured."""

    def having(self, name: str) -> list[Key]:
        """Return the keys of the series that hold an l2 norm of one parameter."""

    def line(self, name: str, rule: str, point: str) -> Line:
        """Return the history of the l2 norm of one parameter, by a rule that has one."""


class InMemory:
    """The records of a session, or those of a run that fits into memory."""

    sampled = 1

    def __init__(self, records: Records) -> None:
        self._records = records

    @property
    def dropped(self) -> int:
        """How many rows had to make room."""
        return self._records.dropped

    def keys(self) -> list[Key]:
        """Return the keys of all series."""
        return [series.key for series in self._records]

    def span(self) -> tuple[int, int] | None:
        """Return the first and the last step, ``None`` where nothing was measured."""
        ends = [end for s in self._records if len(s) for end in (min(s.steps), max(s.steps))]
        return (min(ends), max(ends)) if ends else None

    def having(self, name: str) -> list[Key]:
        """Return the keys of the series that hold an l2 norm of one parameter."""
        return [series.key for series in self._records.series(name, STAT) if series.last(name)]

    def line(self, name: str, rule: str, point: str) -> Line:
        """Return the history of the l2 norm of one parameter, by a rule that has one."""
        found = self._records.series(name, STAT, rule)
        own = [series for series in found if series.key.point == point and series.last(name)]
        pairs = merged(own, name)
        missing = [(step, None) for s in own for step, value in s.cells(name) if value is None]
        timeline: list[tuple[int, float | None]] = [*pairs, *missing]
        finite = [value for _, value in pairs if math.isfinite(value)]
        broken = [step for step, value in pairs if not math.isfinite(value)]
        return Line(
            # By step alone: a step without a gradient has no value to compare.
            history=tuple(value for _, value in sorted(timeline, key=lambda pair: pair[0])),
            first=pairs[0][1],
            middle=median(finite) if finite else math.nan,
            top=max(finite, default=math.nan),
            spike=largest(pairs),
            last=pairs[-1][1],
            nonfinite=len(broken),
            nonfinite_step=min(broken, default=0),
        )
