"""One backward pass from its first gradient to its end: what arrived, in which order.

Passes can run inside one another, and end without a word where they raise. Between two of them
nothing is known to be running.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from itertools import count

from torch import Tensor

from gradsurgeon import _torch
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.cuda_graphs import refuse_graph_capture
from gradsurgeon.runtime.scaler_watch import Scaling
from gradsurgeon.runtime.training_events import BackwardPass, TrainingEvents

# A backward pass that raised never ends, so its entry stays; more than this many are forgotten.
_MOST_OPEN = 16
# The task of no pass at all: -1 is what torch says where none is running.
NONE = -2


@dataclass(slots=True)
class Arrivals:
    """Where hooks note what has arrived: the pass that is running, and its list.

    It reaches no parameter, so that a hook may hold it. All that a hook has to do, as long as one pass
    follows its course, is to compare a number and to append to a list: a model has thousands of them.
    """

    # Both in one, because the hooks of one pass may run in the threads of several devices at once.
    now: tuple[int, list[int]] = (NONE, [])


class BackwardWatch:
    """Opens a `Pass` at its first gradient and hands it over when the backward pass has ended."""

    def __init__(self, events: TrainingEvents, scaling: Scaling) -> None:
        self._events = events
        self._scaling = scaling
        self.arrivals = Arrivals()
        # Passes that ended inside another one, by the thread that both run in.
        self._inner: dict[int, BackwardPass] = {}
        self._time = count()
        self._open: dict[int, BackwardPass] = {}
        self._training: tuple[int, bool] = (-1, False)
        # Handed over while it was still running; what comes after that is no pass of its own.
        self._early: tuple[int, BackwardPass] = (-1, BackwardPass())

    def current(self) -> BackwardPass:
        """Return the pass that is running, opening it if this is its first gradient."""
        task = _torch.graph_task()
        running = self._open.get(task)
        if running is None:
            if self._early[0] == task:
                return self._early[1]
            self._events.backward_started()
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)), None)
            fresh = BackwardPass(scale=self._scaling.scale)
            if _torch.in_compiled_autograd():
                fresh.awaited = set()
            # The threads of two devices can come here at once.
            running = self._open.setdefault(task, fresh)
            if running is fresh and running.awaited is None:
                _torch.queue_callback(partial(self._ending, task))
        return running

    def arrived(self, tensor: int, context: Context) -> None:
        """Note that a tensor has received its gradient, and let the hooks that follow do it alone."""
        running = self.current()
        first = not running.order
        running.runs.append((next(self._time), len(running.order)))
        running.order.append(tensor)
        if first:
            refuse_graph_capture(context)
        task = _torch.graph_task()
        if running.awaited is None:
            # What each rank has got before an average is measured by each hook.
            if not context.ranks.is_reducing:
                self.arrivals.now = task, running.order
            return
        # Compiled autograd runs no callback at its end: the last gradient is the end.
        if first:
            params = ((i, context.parameters.param(i)) for i in context.program.watched)
            running.awaited.update(i for i, p in params if p is not None and _torch.awaits(p))
        running.awaited.discard(tensor)
        if not running.awaited:
            self._early = (task, running)
            self._ended(task)

    def is_training(self, param: Tensor) -> bool:
        """Tell a `backward()` from a `torch.autograd.grad()`; asked once per pass."""
        task = _torch.graph_task()
        if self._training[0] != task:
            self._training = (task, _torch.accumulates(param))
        return self._training[1]

    @uncompiled
    def _ending(self, task: int) -> None:
        # Queued anew from inside a callback it runs after all others, such as that of DDP, which
        # copies the reduced gradients into place.
        _torch.queue_callback(partial(self._ended, task))

    @uncompiled
    def _ended(self, task: int) -> None:
        if self.arrivals.now[0] == task:
            self.arrivals.now = NONE, []
        running = self._open.pop(task, None)
        if running is None:
            return
        thread = threading.get_ident()
        inner = self._inner.pop(thread, None)
        if inner is not None:
            running = inner.followed_by(running)
        # One that has begun around it is handed over at its own end; else only an update can tell.
        if _torch.is_nested() and (self._open or self._events.expects_update()):
            self._inner[thread] = running
        else:
            self._events.backward_finished(running)

    def settle(self, scale: Tensor | None) -> None:
        """Hand over what ended inside a pass that had nothing of its own to hand over.

        Args:
            scale: that a fused optimizer gets its gradients with; for others the scaler has taken it off.
        """
        while self._inner:
            _, inner = self._inner.popitem()
            inner.scale = scale
            self._events.backward_finished(inner)
