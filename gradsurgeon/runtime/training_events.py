"""The protocol by which detectors, which know no rules, report the events of a training to the controller."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from gradsurgeon.distributed.ranks import StopReason
from gradsurgeon.runtime.effect import WeightUpdate
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors.backward_graph import BackwardGraph


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

    def step_starting(self, step: WeightUpdate) -> StopReason | None:
        """Act right before an update; return why weights stay as they are, if they do."""

    def step_finished(self, step: WeightUpdate, *, took_place: bool) -> None:
        """Count an attempted update; an update that raised has not taken place."""

    def step_skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Count an update that a scaler skipped for overflow."""
