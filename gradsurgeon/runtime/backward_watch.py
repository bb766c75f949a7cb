"""Watches backward passes. Comparing gradients before and after a pass shows which parameters it reached, without hooks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.distributed import data_parallel
from gradsurgeon.runtime.passes import BackwardPass, Seen
from gradsurgeon.runtime.refusals import all_go_on_after
from gradsurgeon.runtime.running_passes import (
    RunningPass,
    all_running,
    lock,
    note_inner,
    report_number,
    taken_numbers,
    threads,
)
from gradsurgeon.runtime.training import Training
from gradsurgeon.tensors import _dist, _torch
from gradsurgeon.tensors._backward_calls import BackwardCall, End
from gradsurgeon.tensors.backward_graph import BackwardGraph, roots_of
from gradsurgeon.tensors.readable import readable


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """The gradients that exist when a pass begins, with the number of writes to each."""

    grads: Mapping[int, tuple[Tensor, int]]
    held: Mapping[int, Tensor]


class BackwardWatch:
    """Watches the backward passes that reach the model of one session."""

    def __init__(
        self,
        training: Training,
        finished: Callable[[BackwardPass], None],
        matter: Callable[[Mapping[int, Tensor]], Iterable[int]],
    ) -> None:
        context = training.context
        self.context = context
        self._training = training
        # Acts on the gradients of a finished pass. DDP has averaged them.
        self._finished = finished
        # Returns the tensors for which a rule must know whether their gradients were zero before the pass.
        self._matter = matter
        self.scaling = context.scaling
        self._watched = list(training.effects.watched)
        # The shapes of all parameters, by which all ranks distinguish several models.
        self.shapes: list[tuple[int, ...]] = []
        for param in context.parameters.params():
            shape = () if param is None else tuple(param.shape)
            self.shapes.append(shape)
        self.seen = Seen()
        # Tells a `backward()` from a `torch.autograd.grad()`.
        self.accumulation = _torch.Accumulation()

    def begin(self, running: RunningPass) -> _Before | None:
        """Return the gradients that exist before a pass, ``None`` if it does not reach the model."""
        with lock:
            if len(threads) > 1 and not self._concerns(running):
                return None
            self._training.backward_started(running.graph)
            if len(all_running) == 1:
                # These facts are from an unwatched pass, for example if the session began inside the pass.
                self.seen = Seen()
            indices, grads = self.context.parameters.own_grads(self._watched)
            by_index = dict(zip(indices, grads, strict=True))
            written: dict[int, tuple[Tensor, int]] = {}
            held: dict[int, Tensor] = {}
            if by_index:
                for index, grad in by_index.items():
                    written[index] = (grad, _writes(grad))
                for index in self._matter(by_index):
                    held[index] = _holds_something(by_index[index])
            return _Before(written, held)

    def end(self, running: RunningPass, before: _Before, averaging: Sequence[Any]) -> None:
        """Report a pass, in which some DDP wrappers averaged, to the events, if it reached the model."""
        with lock:
            if len(threads) > 1 and not self._concerns(running):
                return
            indices = self._changed(before)
            # Still under the lock: the first pass of another thread may begin right after it.
            seen = self.seen
            self.seen = Seen()
        order = tuple(dict.fromkeys(seen.order))
        graph: BackwardGraph | None = running.graph
        if order:
            self._drop_sharded(indices)
            if any(map(_dist.is_divided, self.context.parameters.params(order))):
                graph = None
        indices.update(order, seen.calls)
        if indices:
            if _torch.is_capturing():
                self.context.refuse_graph_capture()
        elif not seen.module:
            return
        held = dict(before.held)
        for index in before.held.keys() - indices:
            del held[index]
        self._finished(
            BackwardPass(
                indices=(*order, *sorted(indices.difference(order))),
                graph=graph,
                seen=seen,
                scale=self.scaling.pop_scale(running.tasks),
                averaging=averaging,
                held=held,
                had=before.grads.keys(),
            )
        )

    def _drop_sharded(self, indices: set[int]) -> None:
        """Drop shards: a sharded model has other parameters when a pass begins, so only hooks see its gradients."""
        for index in list(indices):
            param = self.context.parameters.param(index)
            if param is not None and _dist.is_sharded(param):
                indices.discard(index)

    def failed(
        self, running: RunningPass, before: _Before | None, averaging: Sequence[Any]
    ) -> None:
        """Discard the facts that hooks collected in a pass that raised; other ranks learn of the pass."""
        self.scaling.pop_scale(running.tasks)
        if before is not None and _dist.world() > 1:
            with lock:
                indices = self._changed(before).union(self.seen.order)
                self.seen = Seen()
            done = BackwardPass((*indices,), averaging=averaging)
            self._training.agreement.cast(done, ())

    def _concerns(self, running: RunningPass) -> bool:
        """Return whether a pass may reach the model, if other threads also run passes."""
        # The leaves of the graph of a sharded model are not the parameters.
        params = self.context.parameters.params()
        if any(map(_dist.is_divided, params)):
            return True
        return running.reaches(set(map(id, params)))

    def _changed(self, before: _Before) -> set[int]:
        indices, grads = self.context.parameters.own_grads(self._watched)
        if not before.grads:
            return set(indices)
        changed = set()
        for index, grad in zip(indices, grads, strict=True):
            earlier = before.grads.get(index)
            if earlier is None or earlier[0] is not grad or earlier[1] != _writes(grad):
                changed.add(index)
        return changed


def _writes(grad: Tensor) -> int:
    """Return how often autograd wrote to a gradient. Callers compare the number across one backward pass."""
    # Autograd replaces a gradient that is an inference tensor, so its missing count does no harm.
    return _torch.writes(_dist.local(grad))


@_torch.without_grad
def _holds_something(grad: Tensor) -> Tensor:
    # A script that zeroes gradients in place keeps the tensor, so its elements must be read.
    part = _dist.local(grad)
    # A sparse tensor cannot be compared with 0; its stored values can.
    values = part._values() if part.layout == torch.sparse_coo else part  # noqa: SLF001 # no copy
    return (values != 0).any()


# Is called with the graph of a pass that is about to begin, and with its inputs.
Begins = Callable[[BackwardGraph, Sequence[Any]], None]


@dataclass(slots=True, eq=False)
class _WatchedPass(RunningPass):
    """A pass that gives parameters their gradients, and the watches that learn of it."""

    watches: Sequence[BackwardWatch] = ()
    # Takes the hook off that reports its number.
    unnumber: End | None = None
    before: dict[BackwardWatch, _Before] = field(default_factory=dict)

    def show_begin(self) -> None:
        for watch in self.watches:
            before = _guarded(watch, watch.begin, self)
            if before is not None:
                self.before[watch] = before

    def end(self, error: BaseException | None) -> None:
        try:
            if self.unnumber is not None:
                self.unnumber(error)
            self._show_end(has_failed=error is not None)
        except Exception as fault:
            if not _settle(self.watches, fault):
                raise
        finally:
            self.unlist()

    def _show_end(self, *, has_failed: bool) -> None:
        averaging = data_parallel.ended(self.reaches, failed=has_failed)
        if has_failed:
            for watch in self.watches:
                watch.failed(self, self.before.get(watch), averaging)
            return
        # Ranks may wait for each other here, and may have made their sessions in different orders.
        for watch in sorted(self.before, key=attrgetter("shapes")):
            _guarded(watch, watch.end, self, self.before[watch], averaging)


def _guarded(watch: BackwardWatch, look: Callable[..., Any], *args: Any) -> Any:
    try:
        return look(*args)
    except Exception as error:
        if not watch.context.refusals.goes_on_after(error):
            raise
    return None


def around_passes(
    watches: Callable[[], Sequence[BackwardWatch]], begins: Begins
) -> Callable[[BackwardCall], End | None]:
    """Return what to call before each pass. ``begins`` may wait for other ranks, so no lock is held in it."""

    def around(call: BackwardCall) -> End | None:
        known = watches()
        try:
            return _begun(call, known, begins)
        except Exception as error:
            if not _settle(known, error):
                raise
        return None

    return around


def _settle(watches: Sequence[BackwardWatch], error: Exception) -> bool:
    return all_go_on_after([watch.context.refusals for watch in watches], error)


def _begun(call: BackwardCall, watches: Sequence[BackwardWatch], begins: Begins) -> End | None:
    """Show the beginning of a pass that trains, and report the number of another one, if somebody needs it."""
    roots = roots_of(call.outputs)
    scalings = [watch.scaling for watch in watches if watch.scaling.in_use]
    outer = _torch.graph_task()
    if outer != -1:
        # A pass inside another pass is a part of it.
        note_inner(roots)
        return report_number(roots, [partial(each.began_inside, outer=outer) for each in scalings])
    tasks = taken_numbers()
    if tasks is not None:
        return report_number(roots, [tasks.append])
    if not call.accumulates:
        return None
    graph = BackwardGraph(roots, losses=_losses_of(call.outputs))
    watched = _WatchedPass(graph, call.inputs, watches=watches)
    if scalings:
        watched.unnumber = report_number(roots, [watched.tasks.append])
    # While the pass is listed, no other thread takes the gradients that hooks have seen.
    watched.enlist()
    try:
        begins(graph, call.inputs)
        watched.show_begin()
    except BaseException as error:
        watched.end(error)
        raise
    return watched.end


def _losses_of(outputs: Sequence[Any]) -> list[Tensor]:
    """Return the values that a pass begins from, unless they are several numbers, or await a sum over ranks."""
    losses = []
    for loss in outputs:
        is_number = isinstance(loss, Tensor) and loss.numel() == 1
        if not is_number or (type(loss) is not Tensor and _dist.is_partial(loss)):
            continue
        value = readable(loss)
        if value is not None:
            # A mean over the batch may have dimensions of size 1.
            losses.append(value.reshape(()))
    return losses
