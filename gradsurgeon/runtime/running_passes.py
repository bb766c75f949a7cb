"""The backward passes that run in this process: one function of torch runs all that Python begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradsurgeon import _torch
from gradsurgeon._backward_calls import BackwardCall
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import warn
from gradsurgeon.runtime import loss_gradients
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
        thread: in which it was begun.
    """

    graph: BackwardGraph
    makes_graph: bool = False
    tasks: list[int] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def reaches(self, leaves: Collection[int]) -> bool:
        return self.graph.reaches(leaves)


running_passes: list[RunningPass] = []
# Those of `torch.autograd.grad`.
_returning: list[RunningPass] = []
# The threads that have run backward passes. Autograd writes gradients without holding Python's lock: what
# another thread is training must not even be read.
threads: set[int] = set()
# Held while gradients are read as long as there is one thread, so that a second one begins after that.
lock = threading.RLock()
# The leaves that a thread has for itself, by their ids.
_taken: list[tuple[int, frozenset[int]]] = []
_ended = threading.Condition(lock)


_PATIENCE = 10.0  # seconds
_WAITS = (
    "a backward pass waits for that of another thread through the same parameters, which gradsurgeon.backward has for itself "
    "meanwhile; if that one waits for this one in turn, neither ever goes on: run them in one thread"
)


@contextmanager
def alone(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Let no other thread run a backward pass that reaches some leaves; wait for those that run.

    Hooks are taken off them meanwhile, and others are put on.
    """
    mine = threading.get_ident(), frozenset(map(id, leaves))
    with _ended:
        # In a pass of its own a thread would wait for itself.
        if _torch.graph_task() == -1:
            _wait_until(lambda: not (_is_taken(mine[1]) or _is_running(mine[1])))
        _taken.append(mine)
    try:
        yield
    finally:
        with _ended:
            _taken.remove(mine)
            _ended.notify_all()


@contextmanager
def _listed(running: RunningPass, passes: list[RunningPass]) -> Iterator[None]:
    """List a pass among those that run, once no other thread has its leaves for itself."""
    with _ended:
        if any(thread != running.thread for thread, _ in _taken):
            leaves = frozenset(map(id, running.graph.leaves()))
            _wait_until(lambda: not _is_taken(leaves))
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


def _is_taken(leaves: frozenset[int]) -> bool:
    me = threading.get_ident()
    return any(thread != me and not leaves.isdisjoint(taken) for thread, taken in _taken)


def _is_running(leaves: frozenset[int]) -> bool:
    me = threading.get_ident()
    running = (*running_passes, *_returning)
    return any(one.thread != me and one.reaches(leaves) for one in running)


def watched(
    watches: Callable[[], Sequence[BackwardWatch]],
    begins: Callable[[BackwardGraph, Sequence[Any]], None],
) -> Callable[[BackwardCall], AbstractContextManager[None]]:
    """Return what makes the context of a backward pass.

    Args:
        watches: returns what is to be told of a pass.
        begins: called before one that trains with the only inputs that it is to reach, if it was told such. No lock is
            held meanwhile: it may wait for other ranks.
    """

    @contextmanager
    def around(call: BackwardCall) -> Iterator[None]:
        known, outputs = list(watches()), call.outputs
        scalings = [watch.scaling for watch in known if watch.scaling.in_use]
        if (outer := _torch.graph_task()) != -1:
            # A pass inside another one is a part of it.
            roots = _note_inner(outputs)
            with _numbered(roots, [partial(s.began_inside, outer=outer) for s in scalings]):
                yield
            # What has been trained here may be updated here.
            _act_on_waiting(known)
            return
        with loss_gradients.begun() as take:
            if take is not None:
                # What is seen of this pass is seen again by the one that trains.
                with _numbered(roots_of(outputs), [take]):
                    yield
                return
        if not call.accumulates:
            with _noted_as_returning(outputs, known):
                yield
            for watch in known:
                watch.end_of_grad()
            return
        running = _begin(outputs, makes_graph=call.makes_graph)
        # As long as it is listed, no other thread takes what hooks have seen.
        with _listed(running, running_passes):
            begun: dict[BackwardWatch, Any] = {}
            reaches = partial(_reaches, running, call.inputs)
            try:
                begins(running.graph, call.inputs)
                begun |= {watch: watch.begin(running) for watch in known}
                with _numbered(running.graph.roots, [running.tasks.append] if scalings else ()):
                    yield
                # Of several sessions that share a parameter, one may look at what another one edits.
                _act_on_waiting(known, running)
            except BaseException:
                averaging = data_parallel.ended(reaches, failed=True)
                for watch in known:
                    watch.failed(running, begun.get(watch), averaging)
                raise
            averaging = data_parallel.ended(reaches)
            for watch, before in begun.items():
                watch.end(running, before, averaging)

    return around


def _reaches(running: RunningPass, inputs: Sequence[Any], leaves: Collection[int]) -> bool:
    return any(id(leaf) in leaves for leaf in inputs) if inputs else running.reaches(leaves)


@contextmanager
def _noted_as_returning(outputs: Sequence[Any], watches: Sequence[BackwardWatch]) -> Iterator[None]:
    running = RunningPass(BackwardGraph(roots_of(outputs)))
    is_asked_for = any(watch.knows_shared_inputs for watch in watches)
    with (
        _listed(running, _returning),
        _numbered(running.graph.roots, [running.tasks.append] if is_asked_for else ()),
    ):
        yield


def returns_gradients() -> bool:
    """Tell, inside a backward pass, whether it is one of `torch.autograd.grad`.

    Known where a session has rules on tensors that several modules take.
    """
    task = _torch.graph_task()
    return any(task in running.tasks for running in list(_returning))


def _act_on_waiting(watches: Sequence[BackwardWatch], running: RunningPass | None = None) -> None:
    for watch in watches:
        watch.act_on_waiting(running)


def _begin(outputs: Sequence[Any], *, makes_graph: bool) -> RunningPass:
    alone = outputs[0] if len(outputs) == 1 else None
    loss = alone.detach() if isinstance(alone, Tensor) and not alone.dim() else None
    running = RunningPass(BackwardGraph(roots_of(outputs), loss=loss), makes_graph)
    with lock:
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
