"""Backward passes: which gradients they have left, and what hooks saw of them on the way.

What a pass has reached is told by the gradients before and after it, so that no parameter
needs a hook for that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.current_pass import RunningPass, lock, threads, training
from gradsurgeon.runtime.training_events import BackwardPass, TrainingEvents

_SETTLED = 4  # passes; by then most optimizers have stepped


@dataclass(slots=True, eq=False)
class Seen:
    """What hooks saw since the last pass through their model.

    Attributes:
        order: the tensors in the order in which they got their gradients, where hooks tell it.
        module: whether a gradient came to the input or output of a module, or to a tag.
        waiting: the tensors on which rules at `backward` can act together once the pass is over, or
            somebody may use what it has left.
    """

    order: list[int] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)
    logged: defaultdict[str, dict[int, dict[str, Tensor]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    contributed: dict[int, Tensor] = field(default_factory=dict)
    module: bool = False
    waiting: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """The gradients that are there when a pass begins, with the number of writes to each."""

    grads: dict[int, tuple[Tensor, int]]
    held: dict[int, Tensor]


class BackwardWatch:
    """The backward passes that reach the model of one session.

    Args:
        context: what rules may use while they act.
        events: told of them.
    """

    def __init__(self, context: Context, events: TrainingEvents) -> None:
        self._context = context
        self.knows_shared_inputs = any(one.on_shared for one in context.program.modules)
        self._events = events
        self.scaling = context.scaling
        self._watched = list(context.program.watched)
        self.seen = Seen()
        self._accumulation = _torch.Accumulation()
        # Whether rules at `backward` may wait for the end of a pass.
        self._is_waited_for = True
        # How many have been looked at.
        self._passes = 0

    def is_training(self, param: Tensor) -> bool:
        """Tell a `backward()` from a `torch.autograd.grad()`; asked once per pass."""
        return self._accumulation.runs(param)

    def begin(self, running: RunningPass) -> _Before:
        with lock:
            reached = self._reached(running)
            self._events.backward_started(running.graph, reached)
            if len(training) == 1:
                # What is left is of a pass that was not watched, as where the session began inside of it.
                self.seen = Seen()
            tensors, grads = self._context.parameters.grads(
                self._watched if reached is None else sorted(reached)
            )
            by_tensor = dict(zip(tensors, grads, strict=True))
            held = self._events.tensors_that_matter(by_tensor) if by_tensor else ()
            if reached is None and not running.makes_graph:
                self.seen.waiting = self._can_wait(by_tensor)
            return _Before(
                {tensor: (grad, _writes(grad)) for tensor, grad in by_tensor.items()},
                {tensor: _holds_something(by_tensor[tensor]) for tensor in held},
            )

    def _can_wait(self, having: Mapping[int, Tensor]) -> set[int]:
        """Return the tensors of which a pass leaves what it contributes, seen by nobody on its way.

        A hook of the script's on one parameter may read the gradients of all.
        """
        if not self._is_waited_for or self.scaling.in_use or _dist.is_used():
            return set()
        per_tensor = self._context.program.per_tensor
        waiting = set()
        for tensor, param in enumerate(self._context.parameters.params() if per_tensor else ()):
            if param is None:
                continue
            if _torch.hooks_on(param) > (tensor in per_tensor):
                return set()
            if tensor in per_tensor and tensor not in having:
                waiting.add(tensor)
        return waiting

    def act_on_waiting(self, running: RunningPass | None = None) -> None:
        """Let the rules at `backward` act on the gradients that have come and wait for them.

        Args:
            running: the pass that is over; without one a pass may go on, as where a hook steps an optimizer.
        """
        seen = self.seen
        if not seen.waiting:
            return
        reached = self._reached(running) if running is not None else None
        if reached == set() or (running is None and len(threads) > 1):
            return
        # By their hooks, in their order: a part that has not been accumulated yet goes on waiting.
        came = [tensor for tensor in seen.calls if tensor in seen.waiting]
        having = set(self._context.parameters.grads(sorted(came))[0])
        seen.waiting -= having
        taken = seen.waiting.intersection(came)
        if running is not None and taken:
            self._note_taken(min(taken))
        if having:
            self._context.refuse_graph_capture()
            in_order = [tensor for tensor in came if tensor in having]
            self._events.contributed(in_order, seen.logged)

    def _note_taken(self, tensor: int) -> None:
        """Let rules act in their hooks from now on where something takes gradients away within the pass."""
        self._is_waited_for = False
        name = self._context.program.names[tensor]
        text = (
            f"something took the gradient of {name} away before the backward pass was over (a hook on a node "
            "of its graph): rules at `backward` did not act on it in this pass; from now on they do, as it comes"
        )
        step = self._context.counters[tensor].step
        self._context.event_log.notice_once("taken", text, step=step, warn=True)

    def end(self, running: RunningPass, before: _Before, averaging: Sequence[Any]) -> None:
        """Tell of a pass, if it has reached the model.

        Args:
            running: the pass.
            before: what `begin` has returned.
            averaging: the `DistributedDataParallel` wrappers that have averaged in it.
        """
        with lock:
            reached = self._reached(running)
            if reached is None:
                tensors = self._changed(before)
            else:
                tensors = set(self._context.parameters.grads(sorted(reached))[0])
            if reached is None:
                self._look_for_dropped(running)
        seen = self._take_seen(reached)
        order = tuple(dict.fromkeys(seen.order))
        if order:
            # Of a sharded model other parameters stand there when a pass begins: only hooks tell.
            param = self._context.parameters.param
            tensors = {t for t in tensors if (p := param(t)) is None or not _dist.is_sharded(p)}
        divided = any(map(_dist.is_divided, self._context.parameters.params(order)))
        tensors.update(order, seen.calls)
        if not tensors and not seen.module:
            return
        if tensors:
            self._context.refuse_graph_capture()
        self._events.backward_finished(
            BackwardPass(
                tensors=(*order, *sorted(tensors.difference(order))),
                graph=None if divided else running.graph,
                calls=seen.calls,
                logged=seen.logged,
                contributed=seen.contributed,
                scale=self.scaling.of(running.tasks),
                averaging=averaging,
                held={t: flag for t, flag in before.held.items() if t in tensors},
            )
        )

    def _look_for_dropped(self, running: RunningPass) -> None:
        """Tell of gradients that hooks of the script have dropped, as optimizers do that update inside backward.

        A walk over the graph is too much for every pass: they are looked for ever more seldom.
        """
        self._passes += 1
        if self._passes & (self._passes - 1):
            return
        params, param = self._context.parameters, self._context.parameters.param
        lacking = {
            tensor
            for tensor in self._watched
            if (p := param(tensor)) is not None and p.requires_grad and p.grad is None
            if any(
                not type(hook).__module__.startswith("gradsurgeon.") for hook in _torch.hooks_of(p)
            )
        }
        if lacking and (dropped := lacking.intersection(params.owned(running.graph.leaves()))):
            self._events.gradients_dropped(dropped, certain=self._passes >= _SETTLED)

    def failed(
        self, running: RunningPass, before: _Before | None, averaging: Sequence[Any]
    ) -> None:
        """Let rules act on what a pass has left that has raised; forget what hooks have seen of it."""
        try:
            # The script may go on with these gradients.
            self.act_on_waiting(running)
        finally:
            seen = self._take_seen(self._reached(running))
            self.scaling.of(running.tasks)
            if before is not None and _dist.world() > 1:
                with lock:
                    tensors = self._changed(before).union(seen.order)
                self._events.backward_failed(BackwardPass((*tensors,), averaging=averaging))

    def _reached(self, running: RunningPass) -> set[int] | None:
        """Return the tensors that a pass reaches, where other threads run passes of their own.

        ``None`` where there are none, or where the graph knows other leaves than the parameters.
        """
        params = self._context.parameters
        if len(threads) == 1 or any(map(_dist.is_divided, params.params())):
            return None
        return set(params.owned(running.graph.leaves())).intersection(self._watched)

    def _take_seen(self, reached: set[int] | None) -> Seen:
        if reached is not None and not reached:
            return Seen()
        seen, self.seen = self.seen, Seen()
        return seen

    def end_of_grad(self) -> None:
        """Tell of gradients that no parameter has got, where rules on modules saw them."""
        with lock:
            if training:
                return  # What hooks have seen may be of a pass that another thread runs.
            seen, self.seen = self.seen, Seen()
        if seen.module:
            self._events.backward_finished(BackwardPass(()))

    def _changed(self, before: _Before) -> set[int]:
        tensors, grads = self._context.parameters.grads(self._watched)
        if not before.grads:
            return set(tensors)
        changed = set()
        for tensor, grad in zip(tensors, grads, strict=True):
            earlier = before.grads.get(tensor)
            if earlier is None or earlier[0] is not grad or earlier[1] != _writes(grad):
                changed.add(tensor)
        return changed


def _writes(grad: Tensor) -> int:
    """Return how often autograd has written to a gradient. Only compared across one backward pass."""
    # Autograd puts another tensor in the place of one that was made for inference.
    return _torch.writes(_dist.local(grad))


def _holds_something(grad: Tensor) -> Tensor:
    # Scripts that zero in place keep the tensor, so that its elements have to be asked.
    part = _dist.local(grad)
    with torch.no_grad():
        # A sparse one cannot be compared, and has elements only where something was.
        values = part._values() if part.layout == torch.sparse_coo else part  # noqa: SLF001 # no copy
        return (values != 0).any()
