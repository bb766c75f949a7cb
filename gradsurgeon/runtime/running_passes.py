"""Backward passes under way, and those that take the gradient of one loss: which thread may read or write gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors._backward_calls import End
from gradsurgeon.tensors.backward_graph import BackwardGraph, Root

_TOGETHER = (
    "two threads run backward passes through the same parameters, and one of them is a gradsurgeon.backward, which replaces "
    "hooks meanwhile: run both passes in one thread"
)


@dataclass(slots=True, eq=False)
class RunningPass:
    """A running backward pass that gives gradients to parameters, or to ``inputs`` alone; ``tasks`` is its number in autograd."""

    graph: BackwardGraph
    inputs: Sequence[Any] = ()
    tasks: list[int] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def reaches(self, leaves: Collection[int]) -> bool:
        """Return whether the pass gives a gradient to any of some leaves, given by their ids."""
        for tensor in self.inputs:
            if id(tensor) in leaves:
                return True
        return not self.inputs and self.graph.reaches(leaves)

    def enlist(self) -> None:
        with lock:
            if _alone:
                self.refuse_other_threads(_alone)
            threads.add(self.thread)
            if len(threads) > 1:  # a thread that has ended trains nothing
                threads.intersection_update(thread.ident for thread in threading.enumerate())
            all_running.append(self)

    def unlist(self) -> None:
        with lock:
            all_running.remove(self)

    def refuse_other_threads(self, passes: Sequence[RunningPass]) -> None:
        """Raise if one of some passes is of another thread and reaches the same leaves."""
        others = [other for other in passes if other.thread != self.thread]
        if not others:
            return
        leaves = set(map(id, self.graph.leaves()))
        for other in others:
            if other.reaches(leaves):
                raise GradSurgeonError(_TOGETHER)


all_running: list[RunningPass] = []
# The calls of `gradsurgeon.backward` that take the gradients of single losses.
_alone: list[RunningPass] = []
# The threads that ran backward passes. Autograd writes gradients without holding Python's lock: a thread must not
# even read the gradients that another thread is training.
threads: set[int] = set()
# Held while the only thread reads gradients, so a pass in a second thread begins after the read.
lock = threading.RLock()
# Maps each thread to the numbers of its passes that take the gradients of single losses.
_taking: dict[int, list[int]] = {}


@contextmanager
def alone(graph: BackwardGraph) -> Iterator[None]:
    """Keep passes of other threads off the leaves of a graph: they would see other hooks, and add to other gradients."""
    call = RunningPass(graph)
    with lock:
        call.refuse_other_threads([*all_running, *_alone])
        _alone.append(call)
    try:
        yield
    finally:
        with lock:
            _alone.remove(call)


@contextmanager
def taking() -> Iterator[list[int]]:
    """Mark all passes that this thread starts as gradients of one loss, not training; yield their numbers."""
    me = threading.get_ident()
    _taking[me] = tasks = list[int]()
    try:
        yield tasks
    finally:
        _taking.pop(me, None)


def taken_numbers() -> list[int] | None:
    """Return where the numbers of passes of this thread are noted that only take gradients of one loss, if it does."""
    return _taking.get(threading.get_ident())


def is_taken() -> bool:
    """Return, inside a backward pass, whether it only takes the gradients of one loss, in any thread: hooks run in others."""
    if not _taking:
        return False
    task = _torch.graph_task()
    return any(task in tasks for tasks in list(_taking.values()))


def note_inner(roots: Sequence[Root]) -> None:
    if (node := _torch.current_node()) is not None:
        with lock:
            # If several passes run at the same time, only one of them contains the node.
            for running in all_running:
                running.graph.inner.setdefault(node, []).append(roots)


def report_number(roots: Sequence[Root], tell: Sequence[Callable[[int], object]]) -> End | None:
    """Report the number that autograd gives a pass: only the nodes of the pass learn it. Return what ends this."""
    if not (tell and roots):
        return None

    def learn(_: object) -> None:
        for take in tell:
            take(_torch.graph_task())

    handle = _torch.node_of(roots[0]).register_prehook(learn)
    return lambda _: handle.remove()
