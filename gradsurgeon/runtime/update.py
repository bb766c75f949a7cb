"""One call of `Optimizer.step` under way: what was hidden from it, and how its end is told."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon import _torch
from gradsurgeon._patching import Patch
from gradsurgeon.runtime import optimizers
from gradsurgeon.runtime.optimizers import Counters, Snapshot
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.training_events import Step


class Arguments(dict[str, Any]):
    """The keyword arguments of one call of `step`: they live no longer than the call.

    Torch calls no hook after a step that raises. It keeps what a hook has returned as the arguments
    until then, so that their end tells of it.
    """

    __slots__ = ("__weakref__",)


class Update(Step):
    """One call of `Optimizer.step`, from its first hook to its end; it reaches the optimizer weakly.

    ``frame`` is the id of the frame that calls the hooks: that of torch around `step`.
    """

    def __init__(self, optimizer: Optimizer, counter: StepCounter, frame: int) -> None:
        super().__init__(counter, inside=_torch.graph_task() != -1)
        self.optimizer = weakref.ref(optimizer)
        self.thread = threading.get_ident()
        self.key = self.thread, id(optimizer)
        self._frame = frame
        self._kept_frame: FrameType | None = None
        self.arguments: weakref.ref[Arguments] | None = None
        self.snapshot: Snapshot | None = None
        # What the optimizer counts for itself, in a step that is skipped.
        self.kept: Counters = []
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._clearing: Patch | None = None
        # Whether its gradients have been judged, and the last loss that a closure has given before that
        # came to a skip.
        self.judged = False
        self.loss: Any = None
        # The scale under which the gradients overflowed, so that the scaler skips the update.
        self.overflowed: Tensor | None = None
        self.skipped = self.ended = False

    def is_on_stack(self) -> bool:
        frame: FrameType | None = sys._current_frames().get(self.thread)  # noqa: SLF001 # documented
        while frame is not None:
            if id(frame) == self._frame:
                if self.arguments is None or self.arguments() is None:
                    # Nothing else tells of its end: another frame must not get its id.
                    self._kept_frame = frame
                return True
            frame = frame.f_back
        return False

    def ends_with(self, kwargs: dict[str, Any], frame: int) -> bool:
        """Tell whether a hook after a step belongs to this call, and not to one inside it."""
        mine = None if self.arguments is None else self.arguments()
        return kwargs is mine or frame == self._frame

    def settled(self, loss: Any) -> Any:
        if not self.skipped or self.loss is None:
            self.loss = loss
        return self.loss

    def undo(self) -> None:
        """Take back what an optimizer did in this step besides what no gradients keep it from."""
        optimizer = self.optimizer()
        if optimizer is not None and self.snapshot is not None:
            optimizers.restore(optimizer, self.snapshot)
        optimizers.put_back(self.kept)

    def end(self) -> None:
        self.ended = True
        self._kept_frame = None
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
        """Clear what is hidden as well: a script may do so in the step, or after one that has raised."""
        original(*args, **kwargs)
        if kwargs.get("set_to_none", args[0] if args else True):
            self._hidden.clear()
        for _, grad in self._hidden:
            grad.detach_().zero_()

    def give_back(self) -> None:
        """Put back what was hidden."""
        if self._clearing is not None:
            self._clearing.undo()
            self._clearing = None
        hidden, self._hidden = self._hidden, []
        for param, grad in hidden:
            if param.grad is None:
                param.grad = grad
