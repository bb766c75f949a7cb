"""The effects of rules: the values that `Rule.compile` returns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from gradsurgeon.common.events import EventKind
from gradsurgeon.errors import (
    GradientSpikeError,
    GradSurgeonError,
    NonFiniteGradientError,
    TrapError,
)

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
    # Takes norms, float32 of any shape; at most 1, which leaves a gradient as it is.
    factor: Callable[[Tensor], Tensor]
    # Whether several gradients share one norm: all of them, or those whose names ``group`` maps to one text.
    joins: bool = False
    group: Callable[[str], str] | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that a rank holds, or the stored rows of a sparse gradient.

    Attributes:
        shape: the shape of the whole tensor.
        places: for each dimension, the indices in the whole tensor of what is here; int64.
        is_sparse: whether these are the stored rows of a sparse gradient, which are others in each step.
    """

    shape: tuple[int, ...]
    places: tuple[Tensor, ...]
    is_sparse: bool = False

    def part_of(self, whole: Tensor) -> Tensor:
        """Return what is here of a tensor of the shape of the whole, or of one that broadcasts to this shape.

        The rows of a sparse gradient are others in each step: of them the whole is returned.
        """
        if self.is_sparse:
            return whole
        for dim, places in enumerate(self.places):
            if whole.shape[dim] > 1:
                whole = whole.index_select(dim, places.to(whole.device))
        return whole


@dataclass(frozen=True, slots=True)
class At:
    """Where and when an edit acts.

    Attributes:
        name: the name of the parameter, or of the tensor of a module or a tag, as in records.
        weight: the parameter, detached; of a sharded one the part that the gradient belongs to. None for other tensors.
        step: the number of the update, from 0.
        shard: which part of the whole the gradient is; None if it is the whole.
    """

    name: str
    weight: Tensor | None
    step: int
    shard: Shard | None


@dataclass(frozen=True, slots=True)
class Edit:
    """Arithmetic that maps a gradient to another gradient.

    Attributes:
        apply: ``apply(grad)`` or ``apply(grad, at)`` maps a strided gradient to a new one of the same shape, dtype and
            device, out of place, because autograd may hand one tensor to several consumers. ``at`` is an `At`.
        apply_: the same in place, on many gradients without other owners, if that is faster: ``apply_(grads)``. If ``apply``
            takes ``at``, ``apply_(grads, names, step)`` on whole gradients of parameters.
        refuse: ``refuse(at)`` raises `GradSurgeonError` for a part of a parameter that no edit is possible on; asked when the
            rule is attached, if ranks hold parts by then.
        takes_at: whether ``apply`` takes two arguments.
    """

    apply: Callable[..., Tensor]
    apply_: Callable[..., None] | None = None
    refuse: Callable[[At], None] | None = None
    takes_at: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes_at", _takes_two(self.apply))


@dataclass(frozen=True, slots=True)
class MaskedUpdate(Edit):
    """An edit with elements that an update must not change: neither their weights, nor what the optimizer keeps of them.

    Attributes:
        trains: ``trains(weight, at)`` returns which elements an update may change, bool, in a shape that broadcasts.
    """

    trains: Callable[[Tensor, At], Tensor] = field(kw_only=True)


_DIVIDED = "its rows are divided over ranks, and no rank has one whole: leave it out by `exclude`"


def refuse_divided(at: At) -> None:
    """Raise if rows of a tensor, or a vector, are divided over ranks."""
    if at.shard is None:
        return
    whole = list(zip(at.shard.shape, at.shard.places, strict=True))
    for size, places in whole[1:] or whole:
        if len(places) < size:
            raise GradSurgeonError(_DIVIDED)


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        params = inspect.signature(function).parameters.values()
    except ValueError:  # functions of torch have no signature
        return False
    required = 0
    for param in params:
        is_positional = param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)
        required += is_positional and param.default is param.empty
    return required > 1


@dataclass(frozen=True, slots=True)
class Observer:
    """Numbers to record for each gradient.

    Attributes:
        statistics: their names, of `gradsurgeon.statistics.STATISTICS`.
        joins: whether each number is of all gradients together.
    """

    statistics: tuple[str, ...]
    joins: bool = False


# More trips in a row than there can be.
NEVER = sys.maxsize


class Judgement:
    """What becomes of an update that a trap judges."""

    __slots__ = ()
    kind: ClassVar[EventKind] = "trap"
    error: ClassVar[type[TrapError]] = NonFiniteGradientError
    give_up_after: int | Literal["never"]
    forensics: bool = False
    bundle: bool = False

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
        bounds: maps the state of one norm, as numbers, and what passed of it to the bound of a spike
            and its description; ``None`` during the warm-up.
        keeps_mean: whether its mean is a mean of the norms; AdaGC starts at the smallest norm.
        reported: how many rows of the state ``bounds`` gets; ``None`` for all.
        learns_all: whether it also learns the norms of updates that are skipped.
    """

    name: str
    rows: int
    advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    bounds: Callable[[Sequence[float], float], tuple[float, str] | None]
    keeps_mean: bool = True
    reported: int | None = None
    learns_all: bool = False


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
