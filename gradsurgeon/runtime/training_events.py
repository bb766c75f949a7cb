"""Training events of a model, and the protocol by which detectors, which know no rules, report them to the controller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.distributed.ranks import StopReason
from gradsurgeon.errors import TrapError
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _torch, measure
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.measure import Norms

# By rule and by tensor: the statistics of the contribution of a pass, or a copy if the contribution is small.
Logged = dict[str, dict[int, Tensor | tuple[Tensor, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class BackwardPass:
    """One backward pass that has ended.

    Attributes:
        indices: the parameters that got a gradient.
        graph: their order, if it differs from that of ``indices``.
        logged: by rule at `backward` and by tensor, the statistics of this pass's contribution, or a copy of it.
        contributed: norms of this rank's own contributions, before an average.
        held: by tensor, whether its gradient was non-zero before, if a rule needs to know.
    """

    indices: tuple[int, ...]
    graph: BackwardGraph | None = None
    calls: Mapping[int, int] = field(default_factory=dict)
    logged: Logged = field(default_factory=dict)
    contributed: dict[int, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    averaging: Sequence[Any] = ()
    held: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GradientSnapshot:
    """The norms of the gradients that a backward pass left.

    Attributes:
        members: the parameters of one update that the pass feeds.
        indices: those whose norms were taken.
    """

    done: BackwardPass
    parameters: Parameters
    members: Sequence[int]
    indices: Sequence[int]
    norms: Norms

    @property
    def order(self) -> list[int]:
        got = set(self.indices).intersection(self.done.indices)
        came = chain.from_iterable(self.arrived)
        return [index for index in (*came, *self.done.indices) if index in got]

    @property
    def arrived(self) -> list[list[int]]:
        """Return all tensors of the pass in the order of their gradients, in one list where it is unknown; -1 is no parameter."""
        if self.done.graph is not None:
            by_id = {identity: index for index, identity in enumerate(self.parameters.ids())}
            groups = self.done.graph.groups()
            return [[by_id.get(id(leaf), -1) for leaf in group] for group in groups]
        # Only matched parameters have hooks that see the order: other parameters may have come before them.
        told = set(self.done.indices)
        params = enumerate(self.parameters.params())
        others = [t for t, p in params if p is not None and p.requires_grad and t not in told]
        return [*([others] if others else []), *([index] for index in self.done.indices)]

    def among(self, indices: Sequence[int]) -> GradientSnapshot:
        """Return what it says of some of its parameters."""
        if self.members == indices:  # nearly always
            return self
        own = set(indices).intersection(self.members)
        return replace(
            self,
            members=tuple(sorted(own)),
            indices=[index for index in self.indices if index in own],
            norms=measure.among(self.norms, own),
        )

    def without_graph(self) -> GradientSnapshot:
        """Return a copy without the graph, which keeps tensors alive; with the order that a report may need."""
        finite = all(_torch.is_host(norms) and norms.isfinite().all() for _, norms in self.norms)
        first = () if finite else self.order
        indices = tuple(dict.fromkeys((*first, *self.done.indices)))
        return replace(self, done=replace(self.done, indices=indices, graph=None))


@dataclass(slots=True, eq=False)
class WeightUpdate:
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
    # The optimizer may have moved weights in this step already: it evaluates its closure late, or several times.
    has_moved: bool = False
    # Traps have decided that weights stay as they are.
    stopped: bool = False
    # The optimizer was allowed to update; known after the update.
    took_place: bool = False
    # By parameter that the optimizer did not find, the rule that hid it; known after the update.
    hidden_by: Mapping[int, str] = field(default_factory=dict)
    # The step has raised, and its error is on its way to the script.
    raised: bool = False
    # Returns the optimizer, if there is one.
    optimizer: Callable[[], Optimizer | None] = lambda: None


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The decision on one update."""

    # The optimizer must touch nothing.
    skip: bool = False
    # Makes the error that stops the step. A frame that held the error would keep the optimizer alive with its traceback.
    error: Callable[[], TrapError] | None = None
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

    def backward_started(self, graph: BackwardGraph) -> None:
        """Receive the graph of a backward pass before it runs. It may run through another model."""

    def backward_finished(self, done: BackwardPass) -> None:
        """Act on the gradients of a finished backward pass. DDP has averaged them."""

    def backward_failed(self, done: BackwardPass) -> None:
        """Receive a pass that raised after gradients had come."""

    def indices_that_matter(self, held: Mapping[int, Tensor]) -> Collection[int]:
        """Return the tensors for which a rule must know whether their gradients were zero before the pass."""

    def update_began(self, update: WeightUpdate) -> None:
        """Look at weights before an optimizer, whose closure comes later, can move them."""

    def step_starting(self, step: WeightUpdate) -> StepDecision:
        """Act right before an update; return the decision on it."""

    def step_finished(self, step: WeightUpdate, *, took_place: bool) -> None:
        """Count an attempted update; an update that raised has not taken place."""

    def step_skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Count an update that a scaler skipped for overflow."""
