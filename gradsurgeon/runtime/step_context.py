"""One update as rules and traps see it: found out once by the controller, and handed down."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsurgeon.runtime.due_rules import DueRules
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.rank_agreement import Heard
from gradsurgeon.runtime.step_counter import StepCounter


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """One update.

    Attributes:
        counter: of the optimizer that makes it.
        due: the rules that are due in it.
        gradients: of the tensors that these rules judge or act on, as the script hands them over.
        heard: what the ranks said of it.
        overflow: whether the optimizer is going to skip it, if only the device knows.
    """

    counter: StepCounter
    due: DueRules
    gradients: Gradients
    heard: Heard
    overflow: Tensor | None = None

    @property
    def step(self) -> int:
        return self.counter.step
