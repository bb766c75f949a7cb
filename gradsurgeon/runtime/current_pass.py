"""The backward passes that run in this process now, and what each of them is for."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gradsurgeon import _torch
from gradsurgeon.tensors.backward_graph import BackwardGraph


@dataclass(slots=True, eq=False)
class RunningPass:
    """A backward pass that is running.

    Attributes:
        graph: the graph that it runs through.
        makes_graph: whether its gradients get a graph of their own.
        inputs: the only tensors that it gives gradients; empty for all leaves.
        tasks: the number that autograd has given it, once that is known.
        thread: the thread that has begun it.
    """

    graph: BackwardGraph
    makes_graph: bool = False
    inputs: Sequence[Any] = ()
    tasks: list[int] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def reaches(self, leaves: Collection[int]) -> bool:
        """Tell whether it gives a gradient to one of some leaves, by their ids."""
        if self.inputs:
            return any(id(tensor) in leaves for tensor in self.inputs)
        return self.graph.reaches(leaves)


# The passes of `backward()`, and the passes of `torch.autograd.grad()`.
training: list[RunningPass] = []
returning: list[RunningPass] = []
# The threads that have run backward passes. Autograd writes gradients without holding Python's lock: a thread must not
# even read what another one is training.
threads: set[int] = set()
# Held while gradients are read as long as there is one thread, so that a second thread begins after that.
lock = threading.RLock()
# By thread, the numbers of the passes that take the gradients of single losses there.
_taking: dict[int, list[int]] = {}


@contextmanager
def taking() -> Iterator[list[int]]:
    """Let no pass that this thread begins train: each takes the gradients of one loss. Yield their numbers."""
    me = threading.get_ident()
    _taking[me] = tasks = list[int]()
    try:
        yield tasks
    finally:
        _taking.pop(me, None)


def tasks_taken() -> list[int] | None:
    """Return the numbers of the passes that take gradients in this thread, ``None`` where its passes train."""
    return _taking.get(threading.get_ident())


def is_taken() -> bool:
    """Tell, inside a backward pass, whether it only takes the gradients of one loss.

    The pass that trains will see its tensors again. Autograd calls hooks in the threads of its devices.
    """
    if not _taking:
        return False
    task = _torch.graph_task()
    return any(task in tasks for tasks in list(_taking.values()))


def returns_gradients() -> bool:
    """Tell, inside a backward pass, whether it is one of `torch.autograd.grad()`.

    The answer is known where a session has rules on tensors that several modules take.
    """
    task = _torch.graph_task()
    return any(task in running.tasks for running in list(returning))
