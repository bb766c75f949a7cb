"""Calls functions before and around each backward pass, without a frame on the stack while the pass runs.

A frame would show in tracebacks out of `backward`, and would move the line that warnings of torch name. Torch calls a pair of
functions around a pass if it logs the nodes that run: the functions here take the place of that pair.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
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
Around = Callable[[BackwardCall], AbstractContextManager[None]]

_graph: Any = torch.autograd.graph
# Every backward pass that Python starts calls this function.
_RUN = "_engine_run_backward"
_CODE = getattr(_graph, _RUN).__code__
_LOG_NODES = "_register_logging_hooks_on_whole_graph"
_logs_nodes = {"log", "getEffectiveLevel", _LOG_NODES} <= {*_CODE.co_names}

_before: list[Before] = []
_around: list[Around] = []
_installed: list[ExitStack] = []
# The running passes, without passes that run inside another pass.
_running: list[BackwardCall] = []


def before(call: Before) -> Callable[[], None]:
    """Call a function before each backward pass, which may call `around` for it; return a function that ends this."""
    return _added(_before, call, len(_before))


def around(context: Around, *, outermost: bool = False) -> Callable[[], None]:
    """Enter the context that a function returns for each pass, ``outermost`` before earlier ones; return a function that ends this."""
    place = len(_around)
    if outermost:
        place = 0
    return _added(_around, context, place)


def is_only_grad() -> bool:
    """Tell whether passes run, and all of them are `torch.autograd.grad` calls."""
    if not _running:
        return False
    return not any(call.accumulates for call in _running)


def _added(watching: list[Any], watcher: object, place: int) -> Callable[[], None]:
    watching.insert(place, watcher)
    if not _installed:
        _installed.append(_install())

    def end() -> None:
        watching.remove(watcher)
        if not (_before or _around):
            _installed.pop().close()

    return end


def _install() -> ExitStack:
    stack = ExitStack()
    if _logs_nodes:
        stack.callback(Patch(_graph, _LOG_NODES, _begin).undo)
        _graph.log = _AlwaysLogs(_graph.log)
        stack.callback(_restore_logger)
    else:
        # Rules must act, even at the cost of frames on the stack.
        stack.callback(Patch(torch.autograd, _RUN, _run_with_frames).undo)
    return stack


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
    stack = _entered(outputs, frame.f_locals["args"], frame.f_locals["kwargs"])
    if logging.getLogger(_graph.log.name).getEffectiveLevel() <= logging.DEBUG:
        stack.callback(log_nodes(outputs))
    return partial(_end, stack)


@_torch.uncompiled
def _end(stack: ExitStack) -> None:
    # Torch calls this function from a `finally`: if the traceback of the error begins there, the pass raised it.
    error = sys.exception()
    engine = sys._getframe(1)  # noqa: SLF001 # documented
    try:
        if error is None or not _begins_in(error.__traceback__, engine):
            stack.close()
        else:
            stack.__exit__(type(error), error, error.__traceback__)
    except BaseException:
        _torch.forget_pass()
        raise


def _begins_in(trace: TracebackType | None, frame: FrameType) -> bool:
    return trace is not None and trace.tb_frame is frame


def _entered(outputs: Sequence[Any], args: Sequence[Any], named: Mapping[str, Any]) -> ExitStack:
    # By position, torch passes the gradients of the outputs, `retain_graph`, `create_graph` and the inputs.
    call = BackwardCall(outputs, args[3], bool(named.get("accumulate_grad")))
    for act in tuple(_before):
        act(call)
    with ExitStack() as stack:
        for context in tuple(_around):
            stack.enter_context(context(call))
        if _torch.graph_task() == -1:
            _running.append(call)
            stack.callback(_running.remove, call)
        return stack.pop_all()


@_torch.uncompiled
def _run_with_frames(
    run: Callable[..., Any], outputs: Sequence[Any], *args: Any, **named: Any
) -> Any:
    with _entered(outputs, args, named):
        return run(outputs, *args, **named)
