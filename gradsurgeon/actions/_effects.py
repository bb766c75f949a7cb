"""What a compiled rule does: the values that `compile` of a rule returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from gradsurgeon.errors import GradientSpikeError, NonFiniteGradientError, TrapError, did_you_mean
from gradsurgeon.events import EventKind
from gradsurgeon.statistics import STATISTICS

if TYPE_CHECKING:
    from torch import Tensor, dtype

Then = Literal["raise", "skip-step", "warn"]
SpikeThen = Literal["clip", "skip-step", "warn", "raise"]


@dataclass(frozen=True, slots=True)
class ByNorm:
    """An edit that multiplies a gradient by a function of a norm."""

    order: float
    over_rule: bool  # one norm over all gradients of the rule, instead of one for each
    factor: Callable[
        [Tensor], Tensor
    ]  # of norms, float32 of any shape; 1 leaves a gradient as it is


@dataclass(frozen=True, slots=True)
class Edit:
    """Arithmetic that makes another gradient of a gradient.

    Attributes:
        apply: maps a strided gradient to a new one of the same shape, dtype and device, out of place,
            because autograd may hand one tensor to several consumers.
        apply_: the same in place on many gradients that nobody else holds.
        by_norm: where the edit is a multiplication by what a norm says, how: the norm may have to be
            taken over several gradients, or over the parts of one on several ranks.
        alters: tells, as a 0-dim bool tensor on the gradient's device, whether ``apply`` would change
            an element. It never waits for the device.
        decided: tells the same from the smallest and the largest element, of a gradient of some dtype;
            ``None`` where they do not say. Both are NaN where an element is. Only of an edit that maps
            smaller elements to smaller ones (or, as all of them, to larger ones).
    """

    apply: Callable[[Tensor], Tensor]
    apply_: Callable[[Sequence[Tensor]], None]
    alters: Callable[[Tensor], Tensor]
    by_norm: ByNorm | None = None
    decided: Callable[[float, float, dtype], bool | None] | None = None


@dataclass(frozen=True, slots=True)
class Observer:
    """Numbers that are recorded of each gradient.

    Attributes:
        statistics: their names, of `gradsurgeon.statistics.STATISTICS`.
    """

    statistics: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.statistics:
            _check_statistic(name)


class Judgement:
    """What becomes of an update that a trap judges: the base of what traps compile to.

    Attributes:
        kind: of the event when it trips, one of `events.TRIPS`.
        error: is raised when it stops the update.
    """

    __slots__ = ()
    kind: ClassVar[EventKind] = "trap"
    error: ClassVar[type[TrapError]] = NonFiniteGradientError


@dataclass(frozen=True, slots=True)
class Decision(Judgement):
    """Whether an update takes place.

    Attributes:
        statistic: what is taken of each gradient before the update.
        trips: maps the statistic of several gradients, float32 of shape ``[n]``, to bool of the same
            shape: which of them must not reach a weight. It never waits for the device.
        then: what happens to the update where one trips.
        give_up_after: raise after so many trips in a row, whatever ``then`` says.
        forensics: whether the step is run again at the first trip, to find where it went wrong.
        bundle: whether what it takes for that is written where there is no run directory.
    """

    statistic: str
    trips: Callable[[Tensor], Tensor]
    then: Then
    give_up_after: int
    forensics: bool = False
    bundle: bool = False

    def __post_init__(self) -> None:
        _check_statistic(self.statistic)


@dataclass(frozen=True, slots=True)
class RunningBound:
    """A bound on norms that follows the norms of the updates before: n of them, each by itself.

    Attributes:
        name: the option that asks for it, ``sigmas`` or ``times``.
        rows: how many numbers it keeps of each: how many updates, their mean, and more. They are zeros before
            the first update.
        advance: maps what is kept, of shape ``[rows, n]``, and the norms of an update, of shape ``[n]``, to
            those norms as the bound lets them through and to what is kept after the update. A norm that is not
            finite, or 0, leaves what is kept as it is. It never waits for the device.
        bounds: maps one column of what is kept, as numbers, to the norm above which one is a spike and to
            what that is made of, in words; ``None`` as long as there is no bound.
        slack: by how much a norm has to be above the mean at least.
    """

    name: str
    rows: int
    advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    bounds: Callable[[Sequence[float]], tuple[float, str] | None]
    keeps_mean: bool = True
    slack: float = 0.0


@dataclass(frozen=True, slots=True)
class Spikes(Judgement):
    """What becomes of an update whose norm is above a bound that follows the norms before.

    Attributes:
        bound: the bound.
        over_rule: whether it is on one norm over all gradients of the rule, instead of one for each.
        then: what happens to the update where a norm is above it; `clip` takes part in the edits at the step.
        give_up_after: raise after so many skipped updates in a row.
    """

    kind: ClassVar[EventKind] = "spike"
    error: ClassVar[type[TrapError]] = GradientSpikeError

    bound: RunningBound
    over_rule: bool
    then: SpikeThen
    give_up_after: int


@dataclass(frozen=True, slots=True)
class Copies:
    max_bytes: int  # of all that the rule keeps; the oldest make room


@dataclass(frozen=True, slots=True)
class Hidden:
    """The optimizer finds no gradient."""


@dataclass(frozen=True, slots=True)
class Combination:
    """What becomes of the gradients of several losses, or of several modules that take one tensor.

    Attributes:
        weigh: maps the inner products of n gradients, float64 of shape ``[n, n]`` on the host and finite, to the
            weights of their sum, float64 of shape ``[n]``. It may draw from the random numbers of the host.
    """

    weigh: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The gradients of several losses are compared in pairs, and nothing is changed.

    Attributes:
        per: what a pair of gradients is compared over: all that the rule matches, each parameter or module by itself.
    """

    per: Literal["rule", "parameter", "module"]


Effect = Edit | Observer | Decision | Spikes | Copies | Hidden | Combination | Comparison


def _check_statistic(name: str) -> None:
    if name not in STATISTICS:
        hint = did_you_mean(name, STATISTICS) or f"known: {', '.join(STATISTICS)}"
        raise ValueError(f"there is no statistic {name!r}: {hint}")
