"""Training events of a model: the facts, and the protocol by which detectors report them.

Detectors know torch and no rules. Each detector reports to one receiver, the controller of a session, which
knows the order in which rules act.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon import _torch
from gradsurgeon.distributed.ranks import StopReason
from gradsurgeon.errors import TrapError
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.measure import Norms

# By rule and by tensor: the statistics of the contribution of a pass, or a copy if the contribution is small.
Logged = dict[str, dict[int, Tensor | tuple[Tensor, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class BackwardPass:
    """One backward pass that has ended.

    Attributes:
        tensors: the tensors that got a gradient.
        graph: gives the order in which they got it, if it differs from the order of ``tensors``.
        calls: the number of hook calls per tensor with rules at `backward`.
        logged: by rule at `backward` and by tensor, the statistics of this pass's contribution, or a copy of it.
        contributed: the norms of this rank's own contributions, if an average over ranks followed.
        scale: the scale of a `GradScaler` on its gradients.
        averaging: the `DistributedDataParallel` wrappers that averaged in it.
        held: by tensor, whether its gradient was non-zero before, if a rule needs to know.
    """

    tensors: tuple[int, ...]
    graph: BackwardGraph | None = None
    calls: Mapping[int, int] = field(default_factory=dict)
    logged: Logged = field(default_factory=dict)
    contributed: dict[int, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    averaging: Sequence[Any] = ()
    held: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GradientSnapshot:
    """The norms of the gradients that a backward pass left."""

    done: BackwardPass
    parameters: Parameters
    tensors: Sequence[int]
    norms: Norms
    # Whether a rule reports spikes in the order in which the gradients came.
    reported: bool = False

    @property
    def order(self) -> list[int]:
        graph = self.done.graph
        known = () if graph is None else self.parameters.owned_in_order(graph.leaves())
        got = set(self.tensors).intersection(self.done.tensors)
        return [tensor for tensor in (*known, *self.done.tensors) if tensor in got]

    @property
    def arrived(self) -> list[list[int]]:
        """Return all tensors that the pass reached, in the order in which their gradients came.

        Tensors of unknown relative order share a list; -1 marks a leaf that is no parameter of the model.
        """
        if self.done.graph is not None:
            by_id = {identity: tensor for tensor, identity in enumerate(self.parameters.ids())}
            groups = self.done.graph.groups()
            return [[by_id.get(id(leaf), -1) for leaf in group] for group in groups]
        # Only matched parameters have hooks that see the order: other parameters may have come before them.
        told = set(self.done.tensors)
        params = enumerate(self.parameters.params())
        others = [t for t, p in params if p is not None and p.requires_grad and t not in told]
        return [*([others] if others else []), *([tensor] for tensor in self.done.tensors)]

    def without_graph(self) -> GradientSnapshot:
        """Return a copy without the graph, because the graph keeps all tensors of its nodes alive.

        The copy keeps the order of the gradients, unless all norms are known to be finite: then no report needs it.
        """
        finite = all(_torch.is_host(norms) and norms.isfinite().all() for _, norms in self.norms)
        first = () if finite else self.order
        tensors = tuple(dict.fromkeys((*first, *self.done.tensors)))
        return replace(self, done=replace(self.done, tensors=tensors, graph=None))


@dataclass(slots=True, eq=False)
class Step:
    # The counter of the optimizer, or the common counter if the script updates weights by hand.
    counter: StepCounter
    # The scale on the gradients that a fused optimizer gets.
    scale: Tensor | None = None
    # Whether the optimizer is going to skip the update, if only the device knows.
    overflow: Tensor | None = None
    # The update takes place inside a backward pass, on gradients that the pass has finished so far.
    inside: bool = False
    # A trap held the update back.
    skipped: bool = False
    # Returns the optimizer, if there is one.
    optimizer: Callable[[], Optimizer | None] = lambda: None


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The decision on one update."""

    # The optimizer must touch nothing.
    skip: bool = False
    # The error to raise before any weight moves.
    error: TrapError | None = None
    # Parameters that a `freeze` rule hides from the optimizer in this step.
    frozen: tuple[int, ...] = ()
    # The reason, for ranks that have seen nothing.
    cause: StopReason | None = None

    @property
    def stops(self) -> bool:
        return self.skip or self.error is not None


# The optimizer does its update.
GOES_ON = StepDecision()


class TrainingEvents(Protocol):
    """The events that a controller receives, in the order in which they happen."""

    def backward_started(self, graph: BackwardGraph, reached: Collection[int] | None) -> None:
        """Receive a backward pass before it runs. It may run through another model.

        Args:
            graph: the graph of the pass.
            reached: if other threads train also, the only tensors whose gradients may be read now.
        """

    def backward_finished(self, done: BackwardPass) -> None:
        """Act on the gradients of a finished backward pass. DDP has averaged them."""

    def backward_failed(self, done: BackwardPass) -> None:
        """Receive a pass that raised after gradients had come."""

    def tensors_that_matter(self, held: Mapping[int, Tensor]) -> Collection[int]:
        """Return the tensors for which a rule must know whether their gradients were zero before the pass."""

    def update_began(self, update: Step) -> None:
        """Look at weights before an optimizer, whose closure comes later, can move them."""

    def step_starting(self, step: Step) -> StepDecision:
        """Act right before an update; return the decision on it."""

    def step_finished(self, step: Step, *, took_place: bool) -> None:
        """Count an attempted update; an update that raised has not taken place."""

    def step_skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Count an update that a scaler skipped for overflow."""
