"""The effects of rules: the values that `Rule.compile` returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from gradsurgeon.common.events import EventKind
from gradsurgeon.errors import GradientSpikeError, NonFiniteGradientError, TrapError

if TYPE_CHECKING:
    from torch import Tensor

    from gradsurgeon.actions.checks.base import Check

Then = Literal["raise", "skip-step", "warn"]
SpikeThen = Literal["clip", "skip-step", "warn", "raise"]


@dataclass(frozen=True, slots=True)
class ByNorm:
    """An edit that multiplies a gradient by a function of a norm.

    The norm may cover several gradients, or the shards of one gradient on several ranks.
    """

    order: float
    over_rule: bool  # one norm over all gradients of the rule, instead of one for each
    # Takes norms, float32 of any shape; the factor 1 leaves a gradient as it is.
    factor: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Edit:
    """Arithmetic that maps a gradient to another gradient.

    Attributes:
        apply: maps a strided gradient to a new one of the same shape, dtype and device, out of place,
            because autograd may hand one tensor to several consumers.
        apply_: the same in place, on many gradients without other owners.
    """

    apply: Callable[[Tensor], Tensor]
    apply_: Callable[[Sequence[Tensor]], None]


@dataclass(frozen=True, slots=True)
class Observer:
    """Numbers to record for each gradient.

    Attributes:
        statistics: their names, of `gradsurgeon.statistics.STATISTICS`.
    """

    statistics: tuple[str, ...]


# More trips in a row than there can be.
NEVER = sys.maxsize


class Judgement:
    """What becomes of an update that a trap judges."""

    __slots__ = ()
    kind: ClassVar[EventKind] = "trap"
    error: ClassVar[type[TrapError]] = NonFiniteGradientError
    give_up_after: int | Literal["never"]

    @property
    def patience(self) -> int:
        """The number of trips in a row after which the trap raises."""
        if self.give_up_after == "never":
            return NEVER
        return self.give_up_after


@dataclass(frozen=True, slots=True)
class Decision(Judgement):
    """Whether an update takes place.

    Attributes:
        statistic: the number that is computed for each gradient before the update.
        trips: maps the statistic of several gradients, float32 of shape ``[n]``, to bool of the same
            shape: which of them must not reach a weight. It never waits for the device.
        then: the consequence for the update if a gradient trips.
        give_up_after: raise after this many trips in a row, whatever ``then`` says.
        forensics: whether the step is run again at the first trip, to find its fault.
        bundle: whether the data for that is written without a run directory, too.
    """

    statistic: str
    trips: Callable[[Tensor], Tensor]
    then: Then
    give_up_after: int | Literal["never"]
    forensics: bool = False
    bundle: bool = False


@dataclass(frozen=True, slots=True)
class RunningBound:
    """A bound on norms that follows earlier norms; it holds for n norms, each by itself.

    Attributes:
        rows: the numbers in the state of each norm: the count of updates, their mean, and more; first zeros.
        advance: maps the state, of shape ``[rows, n]``, and the norms of an update, of shape ``[n]``, to
            the norms after clipping and the next state. It never waits for the device.
        bounds: maps the state of one norm, as numbers, to the bound of a spike and its
            description; ``None`` during the warm-up.
        keeps_mean: whether its mean is a mean of the norms; AdaGC starts at the smallest norm.
    """

    name: str
    rows: int
    advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    bounds: Callable[[Sequence[float]], tuple[float, str] | None]
    keeps_mean: bool = True


@dataclass(frozen=True, slots=True)
class Spikes(Judgement):
    """Whether an update with a norm above a running bound takes place."""

    kind: ClassVar[EventKind] = "spike"
    error: ClassVar[type[TrapError]] = GradientSpikeError

    bound: RunningBound
    over_rule: bool
    then: SpikeThen
    give_up_after: int | Literal["never"]


@dataclass(frozen=True, slots=True)
class Copies:
    max_bytes: int  # of all copies of the rule; new copies replace the oldest


@dataclass(frozen=True, slots=True)
class Hidden:
    """The optimizer finds no gradient."""


@dataclass(frozen=True, slots=True)
class Combination:
    """How gradients are combined: `weigh` maps inner products, float64 ``[n, n]`` on the host, to weights ``[n]``."""

    weigh: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LossComparison:
    """The gradients of several losses are compared in pairs, and nothing is changed.

    Attributes:
        per: the extent of a comparison: all matches of the rule, or each parameter or module by itself.
    """

    per: Literal["rule", "parameter", "module"]


@dataclass(frozen=True, slots=True)
class Examination:
    """A check that looks at passes and updates.

    Attributes:
        check: the check, for one session.
        then: whether a finding is only reported, or also raised at the update.
    """

    check: Check
    then: Literal["warn", "raise"]


Compiled = (
    Edit
    | ByNorm
    | Observer
    | Decision
    | Spikes
    | Copies
    | Hidden
    | Combination
    | LossComparison
    | Examination
)
