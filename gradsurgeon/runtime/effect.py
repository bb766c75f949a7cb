"""An effect: what one rule does with tensors, one at a time or all of a moment together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gradsurgeon.actions import Rule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule, StepCounter
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.training_events import Logged


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


class Effect:
    """What one rule does. Each method may be left out.

    Tensors come one by one, as they come into being (`on_tensor`), or all gradients of a moment together (`act`): after a
    backward pass, and right before an update.

    Attributes:
        edits: whether it changes tensors.
        takes_any: whether it takes tensors of any dtype and layout, not only numbers that arithmetic is for.
    """

    edits = False
    takes_any = False

    def __init__(self, rule: Rule, context: Context) -> None:
        self.rule = rule
        self.context = context
        self.log = context.event_log

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:  # noqa: ARG002 # of derived effects
        """Act on one tensor, out of place: autograd may share it. Return the tensor that takes its place."""
        return tensor

    def act(self, gradients: Gradients, bound: BoundRule) -> None:
        """Act on the gradients of a moment that the rule matches."""


# The effect of each rule, by its id.
Effects = Mapping[str, Effect]
