"""The norms of one tensor over a run, and what they say of it. Needs numpy."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gradsurgeon.report.sheets import NO_NORM
from gradsurgeon.report.spikes import Floats, Ints, Spike, largest_spike, of_windows

_ENDS = 8  # steps at each end of a run that tell how far a norm grew
_DEAD = 8  # steps with a norm of 0 at the end of a run that are no accident
# An explosion grows so many times, to norms that no usual training has.
_GROWTH = 1e3
_LARGE = 1e2


class RecordOrigin(NamedTuple):
    """Which records show a tensor: of which kind, by which rule, at which point."""

    kind: str
    rule: str
    point: str


@dataclass(frozen=True, eq=False)
class Track:
    """The norms of one tensor, of which at least one is there. Numbers are over finite norms; NaN stands for "none"."""

    name: str
    origin: RecordOrigin
    steps: Ints  # of each record, or of the first of every few records
    norms: Floats  # `NO_NORM` where the tensor had no gradient, or no value

    @cached_property
    def recorded(self) -> Ints:
        """The places of all norms that are there."""
        return np.flatnonzero(self.norms != NO_NORM)

    @cached_property
    def _finite(self) -> Ints:
        return np.flatnonzero(np.isfinite(self.norms) & (self.norms != NO_NORM))

    @property
    def finite_steps(self) -> Ints:
        return self.steps[self._finite]

    @property
    def finite_norms(self) -> Floats:
        return self.norms[self._finite].astype(float)

    @cached_property
    def nonfinite_steps(self) -> Ints:
        return self.steps[~np.isfinite(self.norms)]

    @property
    def first(self) -> float:
        return float(self.norms[self.recorded[0]])

    @property
    def last(self) -> float:
        return float(self.norms[self.recorded[-1]])

    @cached_property
    def median(self) -> float:
        if not len(self._finite):
            return np.nan
        return float(np.median(self.finite_norms))

    @cached_property
    def largest(self) -> float:
        if not len(self._finite):
            return np.nan
        return float(self.finite_norms.max())

    @cached_property
    def spike(self) -> Spike | None:
        """The norm that stands out most. A tensor whose norms grew has none."""
        if self.has_grown:
            return None
        return largest_spike(self.finite_steps, self.finite_norms)

    @property
    def has_grown(self) -> bool:
        """Whether the norms grew to norms that no usual training has."""
        return self.largest >= _LARGE and self.rise >= _GROWTH

    @cached_property
    def rise(self) -> float:
        """How many times the first norms the highest norms are that last a few steps."""
        norms = self.finite_norms
        norms = norms[norms > 0]
        if not len(norms):
            return np.nan
        quarter = max(1, len(norms) // 4)
        begin = np.median(norms[: min(_ENDS, quarter)])
        # A single high norm is no growth, unless a non-finite one follows.
        few = min(3, quarter)
        lasting = of_windows(np.minimum, norms, few)
        # The last call of a module that is seldom called is no growth either.
        end = lasting.max() if few > 1 else lasting[-1]
        if not np.isfinite(self.last):
            end = max(end, norms[-few:].max())
        return float(end / begin)

    @cached_property
    def zero_since(self) -> int | None:
        """The step from which on all norms are 0 until the end."""
        if self.last != 0:
            return None  # nearly always
        alive = np.flatnonzero(self.norms[self.recorded])
        if not len(alive):
            return None
        later = self.recorded[alive[-1] + 1 :]
        # An expert that is rarely chosen rests as long between two choices.
        pause = int(np.diff(alive, prepend=-1).max())
        if len(later) < max(_DEAD, 3 * pause):
            return None
        return int(self.steps[later[0]])
