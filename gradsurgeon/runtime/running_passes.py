"""The backward passes that run in this process: one function of torch runs all that Python begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradsurgeon import _torch
from gradsurgeon.runtime import loss_gradients
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.tensors.backward_graph import BackwardGraph, Root, roots_of

if TYPE_CHECKING:
    from gradsurgeon.runtime.backward_watch import BackwardWatch


@dataclass(slots=True, eq=False)
class RunningPass:
    """A backward pass that is running.

    Attributes:
        graph: what it runs through.
        makes_graph: whether its gradients get a graph of their own.
        tasks: the number that autograd has given it, once it is known.
    """

    graph: BackwardGraph
    makes_graph: bool = False
    tasks: list[int] = field(default_factory=list)


running_passes: list[RunningPass] = []
# Those of `torch.autograd.grad`, by the number that autograd has given them.
_returning: set[int] = set()
# The threads that have run backward passes. Autograd writes gradients without holding Python's lock: what
# another thread is training must not even be read.
threads: set[int] = set()
# Held while gradients are read as long as there is one thread, so that a second one begins after that.
lock = threading.RLock()


def watched(
    watches: Callable[[], Sequence[BackwardWatch]], begins: Callable[[BackwardGraph], None]
) -> Callable[..., Any]:
    """Return what is to be called around the function of torch that runs backward passes.

    Args:
        watches: returns what is to be told of a pass.
        begins: called before one that trains, while no lock is held: it may wait for other ranks.
    """

    @uncompiled
    def run(original: Callable[..., Any], outputs: Sequence[Any], *args: Any, **named: Any) -> Any:
        known = list(watches())
        scalings = [watch.scaling for watch in known if watch.scaling.in_use]
        if (outer := _torch.graph_task()) != -1:
            # A pass inside another one is a part of it.
            roots = _note_inner(outputs)
            with _numbered(roots, [partial(s.began_inside, outer=outer) for s in scalings]):
                returned = original(outputs, *args, **named)
            # What has been trained here may be updated here.
            _act_on_waiting(known)
            return returned
        with loss_gradients.begun() as take:
            if take is not None:
                # What is seen of this pass is seen again by the one that trains.
                with _numbered(roots_of(outputs), [take]):
                    return original(outputs, *args, **named)
        if not named.get("accumulate_grad"):
            with _noted_as_returning(outputs, known):
                returned = original(outputs, *args, **named)
            for watch in known:
                watch.end_of_grad()
            return returned
        running = _begin(outputs, makes_graph=args[2] if len(args) > 2 else True)  # noqa: PLR2004 # by position
        try:
            begins(running.graph)
            begun = [(watch, watch.begin(running)) for watch in known]
            with _numbered(running.graph.roots, [running.tasks.append] if scalings else ()):
                returned = original(outputs, *args, **named)
            # Of several sessions that share a parameter, one may look at what another one edits.
            _act_on_waiting(known, running)
        except BaseException:
            for watch in known:
                watch.failed(running)
            raise
        else:
            for watch, before in begun:
                watch.end(running, before)
        finally:
            # As long as it is there, no other thread takes what hooks have seen.
            with lock:
                running_passes.remove(running)
        return returned

    return run


@contextmanager
def _noted_as_returning(outputs: Sequence[Any], watches: Sequence[BackwardWatch]) -> Iterator[None]:
    if not any(watch.knows_shared_inputs for watch in watches):
        yield
        return
    tasks: list[int] = []

    # Called in the thread of a device, as the pass begins there.
    def note(task: int) -> None:
        tasks.append(task)
        _returning.add(task)

    try:
        with _numbered(roots_of(outputs), [note]):
            yield
    finally:
        _returning.difference_update(tasks)


def returns_gradients() -> bool:
    """Tell, inside a backward pass, whether it is one of `torch.autograd.grad`.

    Known where a session has rules on tensors that several modules take.
    """
    return bool(_returning) and _torch.graph_task() in _returning


def _act_on_waiting(watches: Sequence[BackwardWatch], running: RunningPass | None = None) -> None:
    for watch in watches:
        watch.act_on_waiting(running)


def _begin(outputs: Sequence[Any], *, makes_graph: bool) -> RunningPass:
    alone = outputs[0] if len(outputs) == 1 else None
    loss = alone.detach() if isinstance(alone, Tensor) and not alone.dim() else None
    running = RunningPass(BackwardGraph(roots_of(outputs), loss=loss), makes_graph)
    with lock:
        running_passes.append(running)
        threads.add(threading.get_ident())
        if len(threads) > 1:  # those that have ended train nothing any more
            threads.intersection_update(thread.ident for thread in threading.enumerate())
    return running


def _note_inner(outputs: Sequence[Any]) -> Sequence[Root]:
    roots = roots_of(outputs)
    if (node := _torch.current_node()) is not None:
        with lock:
            # Of several that run beside one another only one has the node.
            for running in running_passes:
                running.graph.inner.setdefault(node, []).append(roots)
    return roots


@contextmanager
def _numbered(roots: Sequence[Root], tell: Sequence[Callable[[int], object]]) -> Iterator[None]:
    """Tell the number that autograd gives a pass, which only its nodes learn."""

    def learn(_: object) -> None:
        for take in tell:
            take(_torch.graph_task())

    handles = [_torch.node_of(root).register_prehook(learn) for root in roots[:1] if tell]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
