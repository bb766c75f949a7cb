"""The backward passes that run in this process now: the thread and the purpose of each pass."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradsurgeon import _torch
from gradsurgeon._backward_calls import BackwardCall
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.tensors.backward_graph import BackwardGraph, roots_of


@dataclass(slots=True, eq=False)
class RunningPass:
    """A backward pass that is running.

    Attributes:
        graph: the graph that the pass runs through.
        makes_graph: whether its gradients get a graph of their own.
        inputs: the only tensors that get gradients; empty for all leaves.
        tasks: the number that autograd gave the pass, once it is known.
        thread: the thread that started the pass.
    """

    graph: BackwardGraph
    makes_graph: bool = False
    inputs: Sequence[Any] = ()
    tasks: list[int] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def reaches(self, leaves: Collection[int]) -> bool:
        """Return whether the pass gives a gradient to any of some leaves, given by their ids."""
        if self.inputs:
            return any(id(tensor) in leaves for tensor in self.inputs)
        return self.graph.reaches(leaves)


# The running passes of `backward()`, and the running passes of `torch.autograd.grad()`.
training: list[RunningPass] = []
returning: list[RunningPass] = []
# The threads that ran backward passes. Autograd writes gradients without holding Python's lock: a thread must not
# even read the gradients that another thread is training.
threads: set[int] = set()
# Held while the only thread reads gradients, so a pass in a second thread begins after the read.
lock = threading.RLock()
# The leaves that a thread has reserved for itself, by their ids.
_reserved: list[tuple[int, frozenset[int]]] = []
_TOGETHER = (
    "two threads run backward passes through the same parameters. One of the passes is a gradsurgeon.backward, which "
    "replaces the hooks on these parameters meanwhile: run both passes in one thread"
)
# By thread, the numbers of its passes that take the gradients of single losses.
_taking: dict[int, list[int]] = {}


@contextmanager
def taking() -> Iterator[list[int]]:
    """Mark all passes that this thread starts as gradients of one loss, not training; yield their numbers."""
    me = threading.get_ident()
    _taking[me] = tasks = list[int]()
    try:
        yield tasks
    finally:
        _taking.pop(me, None)


def tasks_taken() -> list[int] | None:
    """Return the numbers of the passes that take gradients in this thread, ``None`` if its passes train."""
    return _taking.get(threading.get_ident())


def is_taken() -> bool:
    """Return, inside a backward pass, whether the pass only takes the gradients of one loss.

    The training pass will see the tensors again. All threads are searched: autograd calls hooks in device threads.
    """
    if not _taking:
        return False
    task = _torch.graph_task()
    return any(task in tasks for tasks in list(_taking.values()))


def returns_gradients() -> bool:
    """Return, inside a backward pass, whether `torch.autograd.grad()` started the pass.

    The answer is only valid if a session has rules on tensors that several modules share.
    """
    task = _torch.graph_task()
    return any(task in running.tasks for running in list(returning))


def begun(call: BackwardCall) -> RunningPass:
    """Return a pass that is about to train, and note its thread."""
    only = call.outputs[0] if len(call.outputs) == 1 else None
    loss = only.detach() if isinstance(only, Tensor) and not only.dim() else None
    graph = BackwardGraph(roots_of(call.outputs), loss=loss)
    running = RunningPass(graph, call.makes_graph, call.inputs)
    with lock:
        threads.add(running.thread)
        if len(threads) > 1:  # a thread that has ended trains nothing
            threads.intersection_update(thread.ident for thread in threading.enumerate())
    return running


@contextmanager
def alone(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Keep backward passes of other threads off some leaves, whose hooks are replaced in the meantime.

    Raises:
        GradSurgeonError: another thread runs a pass that reaches the leaves.
    """
    mine = threading.get_ident(), frozenset(map(id, leaves))
    with lock:
        others = [one for one in (*training, *returning) if one.thread != mine[0]]
        if any(one.graph.reaches(mine[1]) for one in others) or _is_reserved(mine[1]):
            raise GradSurgeonError(_TOGETHER)
        _reserved.append(mine)
    try:
        yield
    finally:
        with lock:
            _reserved.remove(mine)


@contextmanager
def listed(running: RunningPass, passes: list[RunningPass]) -> Iterator[None]:
    """List a pass among the running passes; raise if another thread has reserved its leaves."""
    with lock:
        if _reserved and _is_reserved(frozenset(map(id, running.graph.leaves()))):
            raise GradSurgeonError(_TOGETHER)
        passes.append(running)
    try:
        yield
    finally:
        with lock:
            passes.remove(running)


def _is_reserved(leaves: frozenset[int]) -> bool:
    me = threading.get_ident()
    return any(thread != me and not leaves.isdisjoint(taken) for thread, taken in _reserved)
