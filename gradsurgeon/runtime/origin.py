"""Where a single tensor comes into being."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gradsurgeon.runtime.passes import Logged
from gradsurgeon.runtime.step_counters import StepCounter


@dataclass(slots=True)
class Origin:
    """Where a single tensor comes into being: the gradient of a parameter, or a tensor of a module or a tag.

    Attributes:
        name: its name in records and messages.
        step: the update that it feeds.
        counter: returns the counter of that update, whose optimizer may be met later.
        scale: the scale of a `GradScaler` on a gradient.
        is_gradient: whether it is a gradient, not a value.
        is_again: whether it came before, because a forward pass is run again, or a backward pass takes the gradient of one
            loss. Edits repeat then, and nothing is counted or recorded.
        index: the parameter, -1 for tensors of modules and tags.
        logged: where statistics of a parameter's gradient wait for the end of the pass.
    """

    name: str
    step: int
    counter: Callable[[], StepCounter]
    scale: Tensor | None = None
    is_gradient: bool = True
    is_again: bool = False
    index: int = -1
    logged: Logged | None = None
