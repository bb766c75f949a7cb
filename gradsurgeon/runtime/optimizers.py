"""Optimizers: what they own, what they keep, and one call of `step` under way."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gradsurgeon import _live, _torch
from gradsurgeon._patching import Patch
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


def evaluates_before_moving(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer is known to call its closure once, before it moves weights."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, LBFGS
    )


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


class Memory:
    """An optimizer before a step: the numbers that it counts for itself, and its weights and state if asked for.

    A step without gradients leaves weights and their state alone. Optimizers still count steps, weights and learning
    rates per group, under their own names in the state, or on themselves.

    Args:
        optimizer: the optimizer.
        whole: whether to keep weights and state also.
    """

    def __init__(self, optimizer: Optimizer, *, whole: bool) -> None:
        params = params_of(optimizer) if whole else []
        self._weights = [(param, param.detach().clone()) for param in params]
        self._state = _copied(dict(optimizer.state), optimizer) if whole else None
        self._numbers = [
            copy.deepcopy({key: it for key, it in part.items() if _is_number(key, it)})
            for part in _tables(optimizer)
        ]

    def put_back(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for param, value in self._weights:
                param.copy_(value)
        if self._state is not None:
            optimizer.state.clear()
            optimizer.state.update(_copied(self._state, optimizer))
        for part, values in zip(_tables(optimizer), self._numbers, strict=False):
            for key in [key for key, it in part.items() if _is_number(key, it)]:
                if key not in values:
                    del part[key]
            for key, value in values.items():
                now = part.get(key)
                if (
                    isinstance(now, Tensor)
                    and isinstance(value, Tensor)
                    and now.shape == value.shape
                ):
                    # Captured graphs and schedulers hold the tensor itself, so its content is restored in place.
                    with torch.no_grad():
                        now.copy_(value)
                else:
                    part[key] = value


def _copied(state: dict[Any, Any], optimizer: Optimizer) -> dict[Any, Any]:
    # The parameters themselves are the keys of the state, and must not be copied.
    return copy.deepcopy(state, {id(param): param for param in params_of(optimizer)})


def _tables(optimizer: Optimizer) -> list[dict[Any, Any]]:
    return [optimizer.state, vars(optimizer), *optimizer.param_groups]


def _is_number(key: object, value: object) -> bool:
    """Tell whether a value is a number of the optimizer itself, and no parameter, state or table."""
    return not isinstance(key, Tensor) and isinstance(value, int | float | Tensor | None)


class Update(Step):
    """One call of `Optimizer.step`, from its first hook to its end; it reaches the optimizer weakly."""

    def __init__(self, optimizer: Optimizer, counter: StepCounter, frame: FrameType) -> None:
        super().__init__(counter, inside=_torch.graph_task() != -1)
        self.optimizer = weakref.ref(optimizer)
        self.key = threading.get_ident(), id(optimizer)
        # The frame that calls the hooks, torch's wrapper around `step`: torch calls no hook after a step that raises.
        self.frame: FrameType | None = frame
        # Present if the optimizer may have moved, or if the step is skipped.
        self.memory: Memory | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._clearing: Patch | None = None
        # Whether traps have judged the gradients, and the last loss that a closure returned before the skip.
        self.judged = False
        self.loss: Any = None
        # The scale under which the gradients overflowed, so the scaler skips the update.
        self.overflowed: Tensor | None = None
        self.skipped = False

    def is_on_stack(self) -> bool:
        """Tell, in the thread of the step, whether the step still runs."""
        return self.frame in _callers()

    def settled(self, loss: Any) -> Any:
        if not self.skipped or self.loss is None:
            self.loss = loss
        return self.loss

    def undo(self) -> None:
        """Restore all optimizer changes that the missing gradients did not prevent."""
        optimizer = self.optimizer()
        if optimizer is not None and self.memory is not None:
            self.memory.put_back(optimizer)

    def skip(self, optimizer: Optimizer) -> None:
        """Hide all gradients: a zero gradient would still decay the weight and feed the moments."""
        self.skipped = True
        self.undo()
        self.memory = self.memory or Memory(optimizer, whole=False)
        self.hide(params_of(optimizer))

    def end(self) -> None:
        self.frame = None
        self.give_back()

    def hide(self, params: Iterable[Tensor | None]) -> None:
        optimizer = self.optimizer()
        if optimizer is not None and self._clearing is None:
            self._clearing = Patch(optimizer, "zero_grad", self._clear)
        for param in params:
            if param is not None and param.grad is not None:
                self._hidden.append((param, param.grad))
                param.grad = None

    def _clear(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Clear hidden gradients also: a script may clear in the step, or after a step that raised."""
        original(*args, **kwargs)
        if kwargs.get("set_to_none", args[0] if args else True):
            self._hidden.clear()
        for _, grad in self._hidden:
            grad.detach_().zero_()

    def give_back(self) -> None:
        if self._clearing is not None:
            self._clearing.undo()
            self._clearing = None
        hidden, self._hidden = self._hidden, []
        for param, grad in hidden:
            if param.grad is None:
                param.grad = grad
