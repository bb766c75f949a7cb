"""What is put on a model before its steps are timed: nothing, rules, or a peer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from benchmarks.workloads import Task, Workload

Kind = Literal["baseline", "rules", "peer"]


@dataclass(frozen=True, slots=True)
class Attached:
    """How a step runs with a case on the model.

    Attributes:
        around: entered around forward and backward.
        after_backward: what the training script calls between backward and update.
        detach: takes it off again.
    """

    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    after_backward: Callable[[], object] = bool  # does nothing
    detach: Callable[[], object] = bool  # does nothing


@dataclass(frozen=True, slots=True)
class Case:
    """Something to put on a model.

    Attributes:
        name: what rows call it.
        kind: whose it is.
        attach: puts it on.
        forward: it makes sense only where a step has a forward pass.
        package: the distribution that it needs, none beside torch where empty.
        alone: a single action, measured on the workloads that ask for it.
        heavy: it does very much per tensor, which nobody would on many of them.
        rest: so many steps are taken before the clock starts, at a learning rate at which weights move.
    """

    name: str
    kind: Kind
    attach: Callable[[Task], Attached]
    forward: bool = False
    package: str = ""
    alone: bool = False
    heavy: bool = False
    rest: int = 0

    def suits(self, workload: Workload) -> bool:
        """Tell whether the case is measured on a workload."""
        if (self.heavy and workload.many) or (self.forward and not workload.forward):
            return False
        return workload.alone or not self.alone


BARE = Case("bare step again", "baseline", lambda _: Attached())


def step_of(task: Task, attached: Attached) -> Callable[[], None]:
    """Return one training step. Gradients are made anew in each, whatever a peer does to them."""

    def step() -> None:
        task.optimizer.zero_grad()
        with attached.around():
            task.backward()
        attached.after_backward()
        task.optimizer.step()

    return step
