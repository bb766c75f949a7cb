"""Calls functions before and around each backward pass, without a frame on the stack while the pass runs.

A frame would show in tracebacks out of `backward`, and would move the line that warnings of torch name. Torch calls a pair of
functions around a pass if it logs the nodes that run: the functions here take the place of that pair.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from gradsurgeon.common._patching import Patch
from gradsurgeon.tensors import _torch


@dataclass(frozen=True, slots=True, eq=False)
class BackwardCall:
    """One call of the engine: from ``outputs``, to ``inputs`` or all leaves; `torch.autograd.grad` does not accumulate."""

    outputs: Sequence[Any]
    inputs: Sequence[Any]
    accumulates: bool


Before = Callable[[BackwardCall], None]
# Is called when a pass is over, with the error that the pass raised.
End = Callable[[BaseException | None], object]
Around = Callable[[BackwardCall], End | None]

_graph: Any = torch.autograd.graph
# Every backward pass that Python starts calls this function.
_CODE = _graph._engine_run_backward.__code__  # noqa: SLF001 # no public name

_before: list[Before] = []
_around: list[Around] = []
_installed: list[ExitStack] = []
# The running passes, without passes that run inside another pass.
_running: list[BackwardCall] = []


def before(call: Before) -> Callable[[], None]:
    """Call a function before each backward pass, which may call `around` for it; return a function that ends this."""
    return _added(_before, call, len(_before))


def around(begin: Around, *, outermost: bool = False) -> Callable[[], None]:
    """Call a function before each pass, ``outermost`` before earlier functions, and what it returns after the pass.

    Return a function that ends this.
    """
    return _added(_around, begin, 0 if outermost else len(_around))


def is_only_grad() -> bool:
    """Tell whether passes run, and all of them are `torch.autograd.grad` calls."""
    for call in _running:
        if call.accumulates:
            return False
    return bool(_running)


def _added(watching: list[Any], watcher: object, place: int) -> Callable[[], None]:
    watching.insert(place, watcher)
    if not _installed:
        stack = ExitStack()
        stack.callback(Patch(_graph, "_register_logging_hooks_on_whole_graph", _begin).undo)
        _graph.log = _AlwaysLogs(_graph.log)
        stack.callback(_restore_logger)
        _installed.append(stack)

    def end() -> None:
        watching.remove(watcher)
        if not (_before or _around):
            _installed.pop().close()

    return end


def _restore_logger() -> None:
    if isinstance(_graph.log, _AlwaysLogs):
        _graph.log = _graph.log.logger


class _AlwaysLogs:
    """The logger that torch asks whether to log a pass. It answers yes, and is otherwise unchanged."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    def getEffectiveLevel(self) -> int:  # noqa: N802 # as loggers have it
        return logging.DEBUG

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logger, name)


@_torch.uncompiled
def _begin(log_nodes: Callable[..., Callable[[], None]], outputs: Sequence[Any]) -> Any:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # documented
    while frame is not None and frame.f_code is not _CODE:
        frame = frame.f_back
    if frame is None:
        return log_nodes(outputs)
    args = frame.f_locals["args"]
    # By position, torch passes the gradients of the outputs, `retain_graph`, `create_graph` and the inputs.
    call = BackwardCall(outputs, args[3], bool(frame.f_locals["kwargs"].get("accumulate_grad")))
    for act in tuple(_before):
        act(call)
    ends = _begun(call)
    # A script may have put a logger of its own in the place of ours.
    log = getattr(_graph.log, "logger", _graph.log)
    if log.getEffectiveLevel() <= logging.DEBUG:
        unlog = log_nodes(outputs)
        ends.append(lambda _: unlog())
    return partial(_end, ends)


@_torch.uncompiled
def _end(ends: list[End]) -> None:
    # Torch calls this function from a `finally`: if the traceback of the error begins there, the pass raised it.
    error = sys.exception()
    if error is not None:
        trace = error.__traceback__
        if trace is None or trace.tb_frame is not sys._getframe(1):  # noqa: SLF001 # documented
            error = None
    try:
        _finish(ends, error)
    except BaseException:
        _torch.forget_pass()
        raise


def _begun(call: BackwardCall) -> list[End]:
    ends: list[End] = []
    try:
        for begin in tuple(_around):
            end = begin(call)
            if end is not None:
                ends.append(end)
    except BaseException as error:
        _finish(ends, error)
        raise
    if _torch.graph_task() == -1:
        _running.append(call)
        ends.append(lambda _: _running.remove(call))
    return ends


def _finish(ends: list[End], error: BaseException | None) -> None:
    """Call functions, the last one first; each of them, even if another one raises."""
    try:
        while ends:
            end = ends.pop()
            end(error)
    except BaseException as raised:
        _finish(ends, raised)
        raise
