"""One call of `Optimizer.step` under way: what was hidden from it, and how its end is told."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon import _torch
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.optimizers import Counters, Snapshot


class Arguments(dict[str, Any]):
    """The keyword arguments of one call of `step`: they live no longer than the call.

    Torch calls no hook after a step that raises. It keeps what a hook has returned as the arguments
    until then, so that their end tells of it.
    """

    __slots__ = ("__weakref__",)


class Update:
    """One call of `Optimizer.step`, from its first hook to its end.

    Args:
        optimizer: reached weakly.
        clock: that of the optimizer.
        frame: the id of the frame that calls the hooks: that of torch around `step`.
        inside: whether it runs inside a backward pass, on what that pass has finished so far.
    """

    def __init__(self, optimizer: Optimizer, clock: Clock, frame: int, *, inside: bool) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.clock = clock
        self.inside = inside
        self.thread = threading.get_ident()
        self.key = self.thread, id(optimizer)
        self._frame = frame
        self.arguments: weakref.ref[Arguments] | None = None
        self.snapshot: Snapshot | None = None
        # What the optimizer counts for itself, in a step that is skipped.
        self.kept: Counters | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        # The scale that a fused optimizer gets its gradients with.
        self.scale: Tensor | None = None
        # Whether a flag on the device can tell the optimizer to skip, and whether one does.
        self.flaggable = self.flagged = False
        # The scale under which the gradients overflowed, so that the scaler skips the update.
        self.overflowed: Tensor | None = None
        self.skipped = self.ended = False

    def is_on_stack(self) -> bool:
        """Tell whether the call is still running: its frame is on the stack of its thread."""
        # What has gone may have left its id to another frame, but its step has ended with its arguments.
        frame: FrameType | None = sys._current_frames().get(self.thread)  # noqa: SLF001 # documented
        while frame is not None:
            if id(frame) == self._frame:
                return True
            frame = frame.f_back
        return False

    def ends_with(self, kwargs: dict[str, Any], frame: int) -> bool:
        """Tell whether a hook after a step belongs to this call, and not to one inside it."""
        mine = None if self.arguments is None else self.arguments()
        return kwargs is mine or frame == self._frame

    def hide(self, params: Iterable[Tensor | None]) -> None:
        """Leave parameters without gradients until the end of the step."""
        for param in params:
            if param is not None and param.grad is not None:
                self._hidden.append((param, param.grad))
                param.grad = None

    def give_back(self) -> None:
        """Put back what was hidden, and take away the flag that tells the optimizer to skip."""
        hidden, self._hidden = self._hidden, []
        for param, grad in hidden:
            if param.grad is None:
                param.grad = grad
        if self.flagged:
            self.flagged = False
            if (optimizer := self.optimizer()) is not None:
                _torch.clear_found_inf(optimizer)
