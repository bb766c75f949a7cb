"""One update as rules and traps see it: the controller collects its facts once and passes them on."""

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
        counter: the counter of the optimizer that makes the update.
        due: the rules that are due in it.
        gradients: the gradients that these rules judge or act on, as the script hands them over.
        heard: the votes of the ranks on it.
        overflow: whether the optimizer is about to skip it, if only the device knows.
    """

    counter: StepCounter
    due: DueRules
    gradients: Gradients
    heard: Heard
    overflow: Tensor | None = None

    @property
    def step(self) -> int:
        return self.counter.step
