"""The protocol by which detectors, which know no rules, report the events of a training to the controller."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from gradsurgeon.runtime.effect import WeightUpdate
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.step_counters import StepCounter


class TrainingEvents(Protocol):
    """The events that a controller receives."""

    def backward_finished(self, done: BackwardPass) -> None:
        """Act on the gradients of a finished backward pass. DDP has averaged them."""

    def indices_that_matter(self, held: Mapping[int, Tensor]) -> Collection[int]:
        """Return the tensors for which a rule must know whether their gradients were zero before the pass."""

    def step_finished(self, step: WeightUpdate, *, took_place: bool) -> None:
        """Count an attempted update; an update that raised has not taken place."""

    def step_skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Count an update that a scaler skipped for overflow."""
