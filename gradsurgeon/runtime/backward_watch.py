"""Watches backward passes. Comparing gradients before and after a pass shows which parameters it reached, without hooks."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.distributed import data_parallel
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.passes import BackwardPass, Logged
from gradsurgeon.runtime.refusals import settle_for_all
from gradsurgeon.runtime.running_passes import (
    RunningPass,
    all_running,
    lock,
    note_inner,
    numbered_pass,
    taken_numbers,
    threads,
)
from gradsurgeon.runtime.training_events import TrainingEvents
from gradsurgeon.tensors import _dist, _torch
from gradsurgeon.tensors._backward_calls import BackwardCall
from gradsurgeon.tensors.backward_graph import BackwardGraph, roots_of
from gradsurgeon.tensors.readable import readable


@dataclass(slots=True, eq=False)
class Seen:
    """Facts that hooks collected since the last pass; ``module`` if a gradient came to a module's tensor or a tag."""

    order: list[int] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=partial(defaultdict, int))
    logged: Logged = field(default_factory=partial(defaultdict, dict))
    contributed: dict[int, Tensor] = field(default_factory=dict)
    module: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """The gradients that exist when a pass begins, with the number of writes to each."""

    grads: Mapping[int, tuple[Tensor, int]]
    held: Mapping[int, Tensor]


class BackwardWatch:
    """Watches the backward passes that reach the model of one session."""

    def __init__(self, context: Context, events: TrainingEvents, watched: Sequence[int]) -> None:
        self.context = context
        self._events = events
        self.scaling = context.scaling
        self._watched = list(watched)
        # The shapes of all parameters, by which all ranks tell several models apart.
        params = context.parameters.params()
        self.shapes = [() if param is None else tuple(param.shape) for param in params]
        self.seen = Seen()
        # Tells a `backward()` from a `torch.autograd.grad()`.
        self.accumulation = _torch.Accumulation()

    def begin(self, running: RunningPass) -> _Before | None:
        """Return the gradients that exist before a pass, ``None`` if it does not reach the model."""
        with lock:
            if not self._concerns(running):
                return None
            self._events.backward_started(running.graph)
            if len(all_running) == 1:
                # These facts are from an unwatched pass, for example if the session began inside the pass.
                self.seen = Seen()
            indices, grads = self.context.parameters.grads(self._watched)
            by_index = dict(zip(indices, grads, strict=True))
            held = self._events.indices_that_matter(by_index) if by_index else ()
            return _Before(
                {index: (grad, _writes(grad)) for index, grad in by_index.items()},
                {index: _holds_something(by_index[index]) for index in held},
            )

    def end(self, running: RunningPass, before: _Before, averaging: Sequence[Any]) -> None:
        """Report a pass, in which some DDP wrappers averaged, to the events, if it reached the model."""
        params = self.context.parameters
        with lock:
            if not self._concerns(running):
                return
            indices = self._changed(before)
            # Still under the lock: the first pass of another thread may begin right after it.
            seen, self.seen = self.seen, Seen()
        order, divided = tuple(dict.fromkeys(seen.order)), False
        if order:
            # A sharded model has other parameters when a pass begins: only hooks see its gradients.
            indices = {
                t for t in indices if (p := params.param(t)) is None or not _dist.is_sharded(p)
            }
            divided = any(map(_dist.is_divided, params.params(order)))
        indices.update(order, seen.calls)
        if indices:
            if _torch.is_capturing():
                self.context.refuse_graph_capture()
        elif not seen.module:
            return
        self._events.backward_finished(
            BackwardPass(
                indices=(*order, *sorted(indices.difference(order))),
                graph=None if divided else running.graph,
                calls=seen.calls,
                logged=seen.logged,
                contributed=seen.contributed,
                scale=self.scaling.of(running.tasks),
                averaging=averaging,
                held=_among(before.held, indices) if before.held else {},
            )
        )

    def failed(
        self, running: RunningPass, before: _Before | None, averaging: Sequence[Any]
    ) -> None:
        """Discard the facts that hooks collected in a pass that raised; other ranks learn of the pass."""
        self.scaling.of(running.tasks)
        if before is not None and _dist.world() > 1:
            with lock:
                indices = self._changed(before).union(self.seen.order)
                self.seen = Seen()
            self._events.backward_failed(BackwardPass((*indices,), averaging=averaging))

    def _concerns(self, running: RunningPass) -> bool:
        """Tell whether a pass may reach the model. Only if other threads also ran passes, its graph is searched."""
        if len(threads) == 1:
            return True
        # The leaves of the graph of a sharded model are not the parameters.
        params = self.context.parameters.params()
        return any(map(_dist.is_divided, params)) or running.reaches(set(map(id, params)))

    def _changed(self, before: _Before) -> set[int]:
        indices, grads = self.context.parameters.grads(self._watched)
        if not before.grads:
            return set(indices)
        changed = set()
        for index, grad in zip(indices, grads, strict=True):
            earlier = before.grads.get(index)
            if earlier is None or earlier[0] is not grad or earlier[1] != _writes(grad):
                changed.add(index)
        return changed


def _among(held: Mapping[int, Tensor], indices: set[int]) -> dict[int, Tensor]:
    return {index: flag for index, flag in held.items() if index in indices}


def _writes(grad: Tensor) -> int:
    """Return how often autograd wrote to a gradient. Callers compare the number across one backward pass."""
    # Autograd replaces a gradient that is an inference tensor, so its missing count does no harm.
    return _torch.writes(_dist.local(grad))


def _holds_something(grad: Tensor) -> Tensor:
    # A script that zeroes gradients in place keeps the tensor, so its elements must be read.
    part = _dist.local(grad)
    with torch.no_grad():
        # A sparse tensor cannot be compared with 0; its stored values can.
        values = part._values() if part.layout == torch.sparse_coo else part  # noqa: SLF001 # no copy
        return (values != 0).any()


Begins = Callable[[BackwardGraph, Sequence[Any]], None]


def around_passes(
    watches: Callable[[], Sequence[BackwardWatch]], begins: Begins
) -> Callable[[BackwardCall], AbstractContextManager[None]]:
    """Return the context of a backward pass. ``begins`` may wait for other ranks, so no lock is held in it."""

    @contextmanager
    def around(call: BackwardCall) -> Iterator[None]:
        known = watches()
        observed: AbstractContextManager[None] = nullcontext()
        try:
            observed = _observed(call, known, begins)
        except Exception as error:
            if not _settle(known, error):
                raise
        with observed:
            yield

    return around


def _settle(watches: Sequence[BackwardWatch], error: Exception) -> bool:
    return settle_for_all([watch.context.refusals for watch in watches], error)


def _observed(
    call: BackwardCall, watches: Sequence[BackwardWatch], begins: Begins
) -> AbstractContextManager[None]:
    """Return the context in which a backward pass runs, so that the watches learn of it."""
    roots = roots_of(call.outputs)
    if (outer := _torch.graph_task()) != -1:
        # A pass inside another pass is a part of it.
        note_inner(roots)
        scalings = [watch.scaling for watch in watches if watch.scaling.in_use]
        return numbered_pass(roots, [partial(one.began_inside, outer=outer) for one in scalings])
    if (tasks := taken_numbers()) is not None:
        return numbered_pass(roots, [tasks.append])
    if call.accumulates:
        graph = BackwardGraph(roots, loss=_loss_of(call.outputs))
        running = RunningPass(graph, call.inputs)
        is_scaled = any(watch.scaling.in_use for watch in watches)
        numbered = numbered_pass(roots, [running.tasks.append] if is_scaled else [])
        return _training(running, watches, begins, numbered)
    return nullcontext()


def _loss_of(outputs: Sequence[Any]) -> Tensor | None:
    """Return the value that a pass begins from, ``None`` if it is not one number that this rank holds."""
    only = outputs[0] if len(outputs) == 1 else None
    if not isinstance(only, Tensor) or only.dim():
        return None
    if type(only) is not Tensor and _dist.is_partial(only):
        return None
    return readable(only)


@contextmanager
def _training(
    running: RunningPass,
    watches: Sequence[BackwardWatch],
    begins: Begins,
    numbered: AbstractContextManager[None],
) -> Iterator[None]:
    """Report a pass that gives parameters their gradients to the watches."""
    # While the pass is listed, no other thread takes the gradients that hooks have seen.
    with running:
        before: dict[BackwardWatch, _Before] = {}
        try:
            try:
                begins(running.graph, running.inputs)
            except Exception as error:
                if not _settle(watches, error):
                    raise
            for watch in watches:
                _show_begin(watch, running, before)
            with numbered:
                yield
        except BaseException:
            _show_failure(watches, running, before)
            raise
        try:
            averaging = data_parallel.ended(running.reaches)
            # Ranks may wait for each other here, and may have made their sessions in different orders.
            for watch in sorted(before, key=attrgetter("shapes")) if len(before) > 1 else before:
                _show_end(watch, running, before[watch], averaging)
        except Exception as error:
            if not _settle(watches, error):
                raise


def _show_begin(
    watch: BackwardWatch, running: RunningPass, before: dict[BackwardWatch, _Before]
) -> None:
    try:
        found = watch.begin(running)
        if found is not None:
            before[watch] = found
    except Exception as error:
        if not watch.context.refusals.settles(error):
            raise


def _show_failure(
    watches: Sequence[BackwardWatch],
    running: RunningPass,
    before: dict[BackwardWatch, _Before],
) -> None:
    try:
        averaging = data_parallel.ended(running.reaches, failed=True)
        for watch in watches:
            watch.failed(running, before.get(watch), averaging)
    except Exception as error:
        if not _settle(watches, error):
            raise


def _show_end(
    watch: BackwardWatch, running: RunningPass, before: _Before, averaging: Sequence[Any]
) -> None:
    try:
        watch.end(running, before, averaging)
    except Exception as error:
        if not watch.context.refusals.settles(error):
            raise
