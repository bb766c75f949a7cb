"""What happens to a model in training: the facts, and the protocol by which detectors tell of them.

Detectors know torch and no rule. Each of them tells one receiver, the controller of a session, which
knows the order in which rules act.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gradsurgeon.distributed.ranks import StopReason
from gradsurgeon.errors import TrapError
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.tensors.backward_graph import BackwardGraph

# By rule and by tensor, the statistics of what a pass has contributed.
Logged = dict[str, dict[int, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, eq=False)
class BackwardPass:
    """One backward pass that has ended.

    Attributes:
        tensors: those that got a gradient.
        graph: by which the order is told in which they got them, where it is not that of ``tensors``.
        calls: how often the hook was called on each tensor that has rules at `backward`.
        logged: by rule at `backward` and by tensor, the statistics of what this pass contributed.
        contributed: norms of what this rank alone has contributed, where an average over ranks followed.
        scale: what a `GradScaler` has multiplied its gradients by.
        averaging: the `DistributedDataParallel` wrappers that have averaged in it.
        held: by tensor, whether its gradient held anything but zeros before, where that matters.
    """

    tensors: tuple[int, ...]
    graph: BackwardGraph | None = None
    calls: Counter[int] = field(default_factory=Counter)
    logged: Logged = field(default_factory=lambda: defaultdict(dict))
    contributed: dict[int, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    averaging: Sequence[Any] = ()
    held: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Step:
    # Of the optimizer, or the common one where weights are updated by hand.
    counter: StepCounter
    # What a fused optimizer gets its gradients with.
    scale: Tensor | None = None
    # Whether it is going to be skipped, where only the device knows.
    overflow: Tensor | None = None
    # It takes place inside a backward pass, on what that pass has finished so far.
    inside: bool = False
    # An update by hand that has been counted goes on: a further backward pass has added to its gradients.
    again: bool = False


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What becomes of one update."""

    # The optimizer must touch nothing.
    skip: bool = False
    # To raise before any weight moves.
    error: TrapError | None = None
    # Parameters that a `freeze` rule hides from the optimizer in this step.
    frozen: tuple[int, ...] = ()
    # What led to it, for ranks that have seen nothing.
    cause: StopReason | None = None


# Nothing keeps the optimizer from what it is about to do.
GOES_ON = StepDecision()


class TrainingEvents(Protocol):
    """What a controller is told, in the order in which it happens."""

    def backward_started(self, graph: BackwardGraph, reached: Collection[int] | None) -> None:
        """Take notice of a backward pass, which may be one through another model, before it runs.

        Args:
            graph: what it runs through.
            reached: where other threads train as well, the only tensors whose gradients may be read now.
        """

    def contributed(self, tensors: Sequence[int], logged: Logged) -> None:
        """Act on gradients that hold what the running pass has contributed, in the order in which they came."""

    def backward_finished(self, done: BackwardPass) -> None:
        """Act on the gradients of a backward pass, what follows its last gradient (DDP) included."""

    def backward_failed(self, done: BackwardPass) -> None:
        """Take notice of a pass that has raised after gradients had come."""

    def gradients_dropped(self, tensors: AbstractSet[int], *, certain: bool) -> None:
        """Take notice of gradients that a pass has made, and that hooks of the script have dropped within it.

        Args:
            tensors: whose gradients are gone.
            certain: whether so many passes have come that an optimizer would have stepped by now.
        """

    def tensors_that_matter(self, held: Mapping[int, Tensor]) -> Collection[int]:
        """Return those of the gradients before a pass of which it has to be known whether they are zero."""

    def expects_update(self) -> bool:
        """Tell whether an optimizer is going to step: what waits may be handed over then."""

    def optimizer_found(self) -> None:
        """Take notice of the first optimizer that owns parameters, before it is one."""

    def step_starting(self, step: Step) -> StepDecision:
        """Act right before an update; return what is to become of it."""

    def step_finished(self, step: Step, *, took_place: bool) -> None:
        """Count an attempted update; one that raised has not taken place."""

    def step_skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Count an update that a scaler has skipped for overflow."""
