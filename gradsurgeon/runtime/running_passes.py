"""The context of each backward pass: one torch function runs all passes that Python begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from gradsurgeon import _torch
from gradsurgeon._backward_calls import BackwardCall
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import warn
from gradsurgeon.runtime import current_pass
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.current_pass import RunningPass, lock, returning, threads, training
from gradsurgeon.tensors.backward_graph import BackwardGraph, Root, roots_of

# The leaves that a thread has reserved for itself, by their ids.
_reserved: list[tuple[int, frozenset[int]]] = []
_ended = threading.Condition(lock)

_PATIENCE = 10.0  # seconds
_WAITS = (
    "a backward pass waits for a gradsurgeon.backward of another thread, which has the same parameters for itself; if "
    "that thread also waits for this one, neither ever goes on: run them in one thread"
)


@contextmanager
def alone(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Keep backward passes of other threads off some leaves; wait for running passes that reach them.

    The hooks on these leaves are replaced in the meantime.
    """
    mine = threading.get_ident(), frozenset(map(id, leaves))
    with _ended:
        # A thread inside a pass would wait for itself.
        if _torch.graph_task() == -1:
            _wait_until(lambda: not (_is_reserved(mine[1]) or _is_running(mine[1])))
        _reserved.append(mine)
    try:
        yield
    finally:
        with _ended:
            _reserved.remove(mine)
            _ended.notify_all()


@contextmanager
def _listed(running: RunningPass, passes: list[RunningPass]) -> Iterator[None]:
    """List a pass among the running passes, once no other thread has reserved its leaves."""
    with _ended:
        if any(thread != running.thread for thread, _ in _reserved):
            leaves = frozenset(map(id, running.graph.leaves()))
            _wait_until(lambda: not _is_reserved(leaves))
        passes.append(running)
    try:
        yield
    finally:
        with _ended:
            passes.remove(running)
            _ended.notify_all()


def _wait_until(is_free: Callable[[], bool]) -> None:
    if not _ended.wait_for(is_free, _PATIENCE):
        warn(_WAITS, stacklevel=2)
        _ended.wait_for(is_free)


def _is_reserved(leaves: frozenset[int]) -> bool:
    me = threading.get_ident()
    return any(thread != me and not leaves.isdisjoint(taken) for thread, taken in _reserved)


def _is_running(leaves: frozenset[int]) -> bool:
    me = threading.get_ident()
    return any(one.thread != me and one.graph.reaches(leaves) for one in (*training, *returning))


def watched(
    watches: Callable[[], Sequence[BackwardWatch]],
    begins: Callable[[BackwardGraph, Sequence[Any]], None],
) -> Callable[[BackwardCall], AbstractContextManager[None]]:
    """Return a function that makes the context of a backward pass.

    Args:
        watches: returns the watches of all sessions that follow a pass.
        begins: called before a pass that trains, with its graph and with its ``inputs=``, if it was given any.
            No lock is held during the call: the function may wait for other ranks.
    """

    @contextmanager
    def around(call: BackwardCall) -> Iterator[None]:
        known, outputs = list(watches()), call.outputs
        if (outer := _torch.graph_task()) != -1:
            # A pass inside another pass is a part of it.
            roots, scalings = _note_inner(outputs), [watch.scaling for watch in known]
            tell = [partial(one.began_inside, outer=outer) for one in scalings if one.in_use]
            with _numbered(roots, tell):
                yield
            # Inside this pass the script may update the parameters that the pass has trained.
            for watch in known:
                watch.act_on_waiting()
        elif (tasks := current_pass.tasks_taken()) is not None:
            with _numbered(roots_of(outputs), [tasks.append]):
                yield
        elif not call.accumulates:
            running = RunningPass(BackwardGraph(roots_of(outputs)), inputs=call.inputs)
            is_known = any(watch.knows_shared_inputs for watch in known)
            append = [running.tasks.append] if is_known else []
            with _listed(running, returning), _numbered(running.graph.roots, append):
                yield
            for watch in known:
                watch.end_of_grad()
        else:
            with _training(call, known, begins):
                yield

    return around


@contextmanager
def _training(
    call: BackwardCall,
    watches: Sequence[BackwardWatch],
    begins: Callable[[BackwardGraph, Sequence[Any]], None],
) -> Iterator[None]:
    """Report a pass that gives parameters their gradients to the watches."""
    running = _begin(call)
    is_scaled = any(watch.scaling.in_use for watch in watches)
    # While the pass is listed, no other thread takes the gradients that hooks have seen.
    with _listed(running, training):
        begun: dict[BackwardWatch, Any] = {}
        try:
            begins(running.graph, call.inputs)
            begun |= {watch: watch.begin(running) for watch in watches}
            with _numbered(running.graph.roots, [running.tasks.append] if is_scaled else []):
                yield
            # If several sessions share a parameter, one session may observe gradients that another edits.
            for watch in watches:
                watch.act_on_waiting(running)
        except BaseException:
            averaging = data_parallel.ended(running.reaches, failed=True)
            for watch in watches:
                watch.failed(running, begun.get(watch), averaging)
            raise
        averaging = data_parallel.ended(running.reaches)
        # Ranks may wait for each other here, and may have made their sessions in different orders.
        for watch in sorted(begun, key=attrgetter("shapes")) if len(begun) > 1 else begun:
            watch.end(running, begun[watch], averaging)


def _begin(call: BackwardCall) -> RunningPass:
    only = call.outputs[0] if len(call.outputs) == 1 else None
    loss = only.detach() if isinstance(only, Tensor) and not only.dim() else None
    graph = BackwardGraph(roots_of(call.outputs), loss=loss)
    running = RunningPass(graph, call.makes_graph, call.inputs)
    with lock:
        threads.add(running.thread)
        if len(threads) > 1:  # a thread that has ended trains nothing
            threads.intersection_update(thread.ident for thread in threading.enumerate())
    return running


def _note_inner(outputs: Sequence[Any]) -> Sequence[Root]:
    roots = roots_of(outputs)
    if (node := _torch.current_node()) is not None:
        with lock:
            # If several passes run at the same time, only one of them contains the node.
            for running in training:
                running.graph.inner.setdefault(node, []).append(roots)
    return roots


@contextmanager
def _numbered(roots: Sequence[Root], tell: Sequence[Callable[[int], object]]) -> Iterator[None]:
    """Report the number that autograd gives a pass: only the nodes of the pass learn it."""

    def learn(_: object) -> None:
        for take in tell:
            take(_torch.graph_task())

    handles = [_torch.node_of(root).register_prehook(learn) for root in roots[:1] if tell]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
