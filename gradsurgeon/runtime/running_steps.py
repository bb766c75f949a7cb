"""Optimizer steps under way: how they end, and what the optimizer does not find or keep in them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from gradsurgeon.common._patching import Patch
from gradsurgeon.distributed.deepspeed_engine import EngineOptimizer
from gradsurgeon.runtime.effect import WeightUpdate
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _backward_calls, _torch
from gradsurgeon.tensors._backward_calls import BackwardCall, End
from gradsurgeon.tensors._torch import uncompiled

# The steps under way, of all sessions and threads.
running: list[RunningStep] = []


class RunningStep(WeightUpdate):
    """One call of `Optimizer.step`, from its first hook to its end; it reaches the optimizer weakly.

    ``on_raise`` is called if the step raises.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        counter: StepCounter,
        frame: FrameType,
        on_raise: Callable[[RunningStep], None],
    ) -> None:
        inside = _torch.graph_task() != -1
        super().__init__(counter, inside=inside, optimizer=weakref.ref(optimizer))
        self.thread = threading.get_ident()
        # The frame that calls the hooks, torch's wrapper around `step`.
        self.frame: FrameType | None = frame
        self.on_raise = on_raise
        # Nothing is hidden in most steps.
        self._hidden: HiddenGradients | None = None
        # Lets a fused optimizer leave the update out if the device finds that it is 1.
        self.flag: LentFlag | None = None
        self._counts: Counts | None = None
        # Whether traps have judged the gradients, and the last loss that a closure returned.
        self.judged = False
        self.loss: Any = None
        # Whether an engine has left the update out, because gradients were not finite.
        self.left_out = False
        # A parameter whose gradient the optimizer finds: it shows whether the step clears gradients.
        self.witness: Tensor | None = None

    def is_on_stack(self) -> bool:
        """Return whether the step still runs in its thread."""
        # A variable with this function's own frame would be a cycle, which keeps all that its callers hold alive.
        return self.frame in callers(sys._current_frames().get(self.thread))  # noqa: SLF001 # documented

    def skip(self, optimizer: Optimizer) -> None:
        """Hide all gradients: a zero gradient would still decay the weight and feed the moments."""
        self._counts = Counts(optimizer)
        self.hide(optimizer, params_of(optimizer))

    def hide(self, optimizer: Optimizer, params: Iterable[Tensor | None]) -> None:
        if self._hidden is None:
            self._hidden = HiddenGradients(optimizer, params)

    def show(self, *, cleared: bool = False) -> None:
        """Give hidden gradients back, unless the step has ``cleared`` the others, and take back what a skipped step counted."""
        # Each goes once it is done: after a fault, the end of the step does the rest.
        if self.flag is not None:
            self.flag.put_back()
            self.flag = None
        if self._hidden is not None:
            self._hidden.show(cleared=cleared)
            self._hidden = None
        if self._counts is not None:
            self._counts.put_back()
            self._counts = None

    def has_cleared(self) -> bool | None:
        """Return whether the step has cleared the gradients that it found; `None` if it found none."""
        if self.witness is None:
            return None
        return self.witness.grad is None

    def end(self) -> None:
        running.remove(self)
        optimizer = self.optimizer()
        if isinstance(optimizer, EngineOptimizer) and optimizer.left_out:
            self.left_out = True
            self.returned = False
            self.overflowed = self.scale
        self.show(cleared=bool(self.has_cleared()))
        self.frame = None
        self.witness = None


class LentFlag:
    """The attribute `found_inf` of a fused optimizer for one step; that of a `GradScaler` comes back, because it deletes it."""

    _NAMES = ("found_inf", "grad_scale")

    def __init__(self, optimizer: Optimizer, flag: Tensor) -> None:
        self.value = flag
        self._attributes = vars(optimizer)
        self._before = {}
        for name in self._NAMES:
            if name in self._attributes:
                self._before[name] = self._attributes[name]
        self._attributes |= {"grad_scale": None, **self._before, "found_inf": flag}

    @property
    def of_scaler(self) -> Tensor | None:
        flag: Tensor | None = self._before.get("found_inf")
        return flag

    def put_back(self) -> None:
        for name in self._NAMES:
            if name in self._before:
                self._attributes[name] = self._before[name]
            else:
                self._attributes.pop(name, None)


class HiddenGradients:
    """Gradients that an optimizer does not find while it steps.

    Code of the script that may act on gradients finds them: `zero_grad`, a backward pass, hooks after the step, and the
    caller of a step that has raised.
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor | None]) -> None:
        self._params = list(params)
        self._grads: list[tuple[Tensor, Tensor]] = []
        self._thread = threading.get_ident()
        self._watching = ExitStack()
        self._take()
        self._watching.callback(Patch(optimizer, "zero_grad", self._clear).undo)
        self._watching.callback(_backward_calls.around(self._accumulate, outermost=True))

    def show(self, *, cleared: bool = False) -> None:
        self._watching.close()
        if cleared:
            self._grads.clear()
        self._give_back()

    def _take(self, _error: BaseException | None = None) -> None:
        for param in self._params:
            if param is not None and param.grad is not None:
                self._grads.append((param, param.grad))
                param.grad = None

    def _give_back(self) -> None:
        grads = self._grads
        self._grads = []
        for param, grad in grads:
            if param.grad is None:
                # The step may have given the parameter another shape or dtype.
                with suppress(RuntimeError):
                    param.grad = grad

    def _clear(self, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._give_back()
        try:
            return zero_grad(*args, **kwargs)
        finally:
            self._take()

    def _accumulate(self, call: BackwardCall) -> End | None:
        if not call.accumulates or threading.get_ident() != self._thread:
            return None
        self._give_back()
        return self._take


class Counts:
    """What an optimizer counts beside weights and moments. Some count their steps even if no parameter has a gradient."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._state: dict[Any, Any] = getattr(optimizer, "state", {})
        self._known = set(self._state)
        by_name = [table for table in self._state.values() if isinstance(table, dict)]
        groups = getattr(optimizer, "param_groups", ())
        tables = [vars(optimizer), *groups, self._state, *by_name]
        self._tables = [(table, _numbers(table)) for table in tables]

    def put_back(self) -> None:
        for key in list(self._state):
            if key not in self._known:
                del self._state[key]
        for table, numbers in self._tables:
            for key in _numbers(table):
                if key not in numbers:
                    del table[key]
            for key, (value, content) in numbers.items():
                if content is not None:
                    # Schedulers and captured graphs hold the tensor itself.
                    with torch.no_grad():
                        value.copy_(content)
                table[key] = value


def _numbers(table: dict[Any, Any]) -> dict[Any, tuple[Any, Tensor | None]]:
    """Return the numbers in a table, with a copy of the content of each tensor among them."""
    numbers: dict[Any, tuple[Any, Tensor | None]] = {}
    for key, value in table.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            numbers[key] = value, value.detach().clone()
        elif value is None or isinstance(value, int | float):
            numbers[key] = value, None
    return numbers


def watch_ends() -> Callable[[], None]:
    """Notice the end of each step: torch calls no hook after a step that raises. Return a function that stops this."""
    # Torch runs hooks and step within this context.
    patch = Patch(record_function, "__exit__", _leave)

    def end() -> None:
        patch.undo()
        # A step under way calls the function that it found when it began.
        patch.active = True

    return end


@uncompiled
def _leave(leave: Callable[..., Any], *args: Any) -> Any:
    try:
        return leave(*args)
    finally:
        if running:
            # The caller of the patched function.
            frame = sys._getframe(2)  # noqa: SLF001 # documented
            # The sessions of one step undo their changes in reverse order. Other threads begin and end steps.
            for update in reversed(tuple(running)):
                if update.frame is frame:
                    update.on_raise(update)


def end_failed() -> list[RunningStep]:
    """End the steps of this thread that have raised, if torch did not show their end; return those under way."""
    under_way = []
    thread = threading.get_ident()
    for update in tuple(running):
        if update.thread != thread:
            continue
        if update.is_on_stack():
            under_way.append(update)
        else:
            update.on_raise(update)
    return under_way


def callers(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and the frames that called it."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def lent_flags(optimizer: Optimizer) -> list[LentFlag]:
    """Return the flags that other sessions have lent to an optimizer for the step that begins, the latest last."""
    steps = [update for update in tuple(running) if update.optimizer() is optimizer]
    return [update.flag for update in steps if update.flag is not None]


def params_of(optimizer: Optimizer) -> list[Tensor]:
    # Wrappers that skip the constructor of their base class may have no groups of their own.
    params: list[Tensor] = []
    for group in getattr(optimizer, "param_groups", ()):
        params += group["params"]
    return params
