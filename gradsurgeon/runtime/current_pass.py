"""The backward passes that run in this process now: the thread and the purpose of each pass."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gradsurgeon import _torch
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.tensors.backward_graph import BackwardGraph


@dataclass(slots=True, eq=False)
class RunningPass:
    """A backward pass, listed among the running passes within its context.

    The context raises `GradSurgeonError` if another thread runs a pass through the same leaves, and one of the two
    must be alone.

    Attributes:
        graph: the graph that the pass runs through.
        trains: True for a `backward()`, False for a `torch.autograd.grad()`.
        inputs: the only tensors that get gradients; empty for all leaves.
        is_alone: whether no other thread may run a pass that reaches the same leaves.
        tasks: the number that autograd gave the pass, once it is known.
        thread: the thread that started the pass.
    """

    graph: BackwardGraph
    trains: bool = False
    inputs: Sequence[Any] = ()
    is_alone: bool = False
    tasks: list[int] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def reaches(self, leaves: Collection[int]) -> bool:
        """Return whether the pass gives a gradient to any of some leaves, given by their ids."""
        if self.inputs:
            return any(id(tensor) in leaves for tensor in self.inputs)
        return self.graph.reaches(leaves)

    def __enter__(self) -> None:
        with lock:
            others = [
                other
                for other in _running
                if other.thread != self.thread and (other.is_alone or self.is_alone)
            ]
            leaves = set(map(id, self.graph.leaves())) if others else set()
            if any(other.graph.reaches(leaves) for other in others):
                raise GradSurgeonError(_TOGETHER)
            if self.trains:
                threads.add(self.thread)
                if len(threads) > 1:  # a thread that has ended trains nothing
                    threads.intersection_update(thread.ident for thread in threading.enumerate())
            _running.append(self)

    def __exit__(self, *_: object) -> None:
        with lock:
            _running.remove(self)


_running: list[RunningPass] = []
# The threads that ran backward passes. Autograd writes gradients without holding Python's lock: a thread must not
# even read the gradients that another thread is training.
threads: set[int] = set()
# Held while the only thread reads gradients, so a pass in a second thread begins after the read.
lock = threading.RLock()
# By thread, the numbers of its passes that take the gradients of single losses.
_taking: dict[int, list[int]] = {}
_TOGETHER = (
    "two threads run backward passes through the same parameters. One of the passes is a gradsurgeon.backward, which "
    "replaces the hooks on these parameters meanwhile: run both passes in one thread"
)


def training() -> list[RunningPass]:
    """Return the running passes that give parameters their gradients."""
    return [one for one in _running if one.trains]


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
