"""Optimizers: what they own, and one call of `step` under way."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon import _live, _torch
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.training_events import Step


def owning(params: Iterable[Tensor]) -> list[Optimizer]:
    wanted = {id(param) for param in params}

    def candidates() -> list[Optimizer]:
        return [
            optimizer
            for optimizer in _live.instances(Optimizer)
            if any(id(param) in wanted for param in params_of(optimizer))
            and _torch.stepping(optimizer) is not None
        ]

    if not candidates():
        return []
    # Garbage that still waits for collection must not pass for the owner.
    gc.collect()
    return candidates()


def params_of(optimizer: Optimizer) -> list[Tensor]:
    # Wrappers that skip the constructor of their base class may have no groups of their own.
    groups = getattr(optimizer, "param_groups", ())
    return [param for group in groups for param in group["params"]]


def only_makes_state(optimizer: Optimizer) -> bool:
    """Tell whether `torch.distributed.checkpoint` steps a fresh optimizer to create its state."""
    module = "torch.distributed.checkpoint.state_dict"
    if optimizer.state or module not in sys.modules:
        return False
    for frame in _callers():
        if frame.f_code.co_name == "_init_optim_state":
            return frame.f_globals.get("__name__") == module
    return False


def _callers() -> list[FrameType]:
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 # documented
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


class Update(Step):
    """One call of `Optimizer.step`, from its first hook to its end; it reaches the optimizer weakly."""

    def __init__(self, optimizer: Optimizer, counter: StepCounter, frame: FrameType) -> None:
        super().__init__(counter, inside=_torch.graph_task() != -1)
        self.optimizer = weakref.ref(optimizer)
        self.key = threading.get_ident(), id(optimizer)
        # The frame that calls the hooks, torch's wrapper around `step`: torch calls no hook after a step that raises.
        self.frame: FrameType | None = frame
        self._hidden: list[tuple[Tensor, Tensor]] = []
        # The numbers that the optimizer keeps on itself and in its groups, if the step is skipped.
        self._numbers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        # Whether traps have judged the gradients, and the last loss that a closure returned.
        self.judged = False
        self.loss: Any = None
        # The scale under which the gradients overflowed, so the scaler skips the update.
        self.overflowed: Tensor | None = None
        self.skipped = False

    def is_on_stack(self) -> bool:
        """Tell, in the thread of the step, whether the step still runs."""
        return self.frame in _callers()

    def skip(self, optimizer: Optimizer) -> None:
        """Hide all gradients: a zero gradient would still decay the weight and feed the moments."""
        self.skipped = True
        tables: list[dict[str, Any]] = [vars(optimizer), *optimizer.param_groups]
        self._numbers = [
            (table, {key: it for key, it in table.items() if isinstance(it, int | float)})
            for table in tables
        ]
        self.hide(params_of(optimizer))

    def hide(self, params: Iterable[Tensor | None]) -> None:
        for param in params:
            if param is not None and param.grad is not None:
                self._hidden.append((param, param.grad))
                param.grad = None

    def end(self) -> None:
        self.frame = None
        # Some optimizers count their steps even if no parameter has a gradient.
        for table, numbers in self._numbers:
            table.update(numbers)
        self.give_back()

    def give_back(self) -> None:
        hidden, self._hidden = self._hidden, []
        for param, grad in hidden:
            if param.grad is None:
                param.grad = grad
