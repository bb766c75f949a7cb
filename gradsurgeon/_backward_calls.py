"""Calls functions around each backward pass, without a frame on the stack while the pass runs.

A frame would show in tracebacks out of `backward`, and would move the line that warnings of torch name.
If torch logs the nodes that run, it calls two functions of its own around a pass. Our functions replace them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from gradsurgeon import _torch
from gradsurgeon._patching import Patch

_uncompiled = _torch.uncompiled("gradsurgeon watches backward passes")
_graph: Any = torch.autograd.graph
# Every backward pass that Python starts calls this function.
_NAME = "_engine_run_backward"
_CODE = getattr(_graph, _NAME).__code__
# `_engine_run_backward` asks a logger whether to log. If so, it calls this function before the pass, and the
# function that this one returned after the pass. Torch 2.1 and all later releases do so.
_LOG_NODES = "_register_logging_hooks_on_whole_graph"
_logs_nodes = {"log", "getEffectiveLevel", _LOG_NODES} <= {*_CODE.co_names} and {
    "args",
    "kwargs",
} <= {*_CODE.co_varnames}


@dataclass(frozen=True, slots=True, eq=False)
class BackwardCall:
    """One call of the engine.

    Attributes:
        outputs: the tensors or edges at which the pass begins.
        makes_graph: whether the gradients get a graph of their own.
        inputs: the only leaves that get gradients, empty for all leaves.
        accumulates: True for a `backward()`, False for a `torch.autograd.grad()`.
    """

    outputs: Sequence[Any]
    makes_graph: bool
    inputs: Sequence[Any]
    accumulates: bool


Before = Callable[[BackwardCall], None]
Around = Callable[[BackwardCall], AbstractContextManager[None]]

_before: list[Before] = []
_around: list[Around] = []
_installed: list[ExitStack] = []
# The running passes, without passes that run inside another pass.
_running: list[BackwardCall] = []


def before(call: Before) -> Callable[[], None]:
    """Call a function before each backward pass; return a function that ends this.

    If the function itself calls `around`, the new context is already entered for this pass.
    """
    return _added(_before, call)


def around(context: Around) -> Callable[[], None]:
    """Enter a context before each backward pass and leave it after the pass; return a function that ends this.

    Args:
        context: returns the context for a pass. If the pass raises, the context gets the exception.
    """
    return _added(_around, context)


def is_only_grad() -> bool:
    """Tell whether passes run, and all of them are `torch.autograd.grad` calls."""
    return bool(_running) and not any(call.accumulates for call in _running)


def _added(watching: list[Any], one: object) -> Callable[[], None]:
    watching.append(one)
    if not _installed:
        _installed.append(_install())

    def end() -> None:
        watching.remove(one)
        if not (_before or _around):
            _installed.pop().close()

    return end


def _install() -> ExitStack:
    stack = ExitStack()
    if _logs_nodes:
        stack.callback(Patch(_graph, _LOG_NODES, _begin).undo)
        _graph.log = _AlwaysLogs(_graph.log)
        stack.callback(_put_logger_back)
    else:
        # Rules must act, even at the cost of a frame on the stack.
        stack.callback(Patch(torch.autograd, _NAME, _with_a_frame).undo)
    return stack


def _put_logger_back() -> None:
    if isinstance(_graph.log, _AlwaysLogs):
        _graph.log = _graph.log.logger


class _AlwaysLogs:
    """Wraps the torch logger that decides whether a pass is logged: it answers yes and is otherwise unchanged."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    def getEffectiveLevel(self) -> int:  # noqa: N802 # as loggers have it
        return logging.DEBUG

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logger, name)


@_uncompiled
def _begin(log_nodes: Callable[..., Callable[[], None]], outputs: Sequence[Any]) -> Any:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # documented
    while frame is not None and frame.f_code is not _CODE:
        frame = frame.f_back
    known = {} if frame is None else frame.f_locals
    stack = _entered(outputs, known.get("args", ()), known.get("kwargs", {}))
    logger = _graph.log
    if getattr(logger, "logger", logger).getEffectiveLevel() <= logging.DEBUG:
        stack.callback(log_nodes(outputs))
    return partial(_end, stack)


@_uncompiled
def _end(stack: ExitStack) -> None:
    # Torch calls this function from a `finally`: if the traceback of the error begins there, the pass raised it.
    error, engine = sys.exception(), sys._getframe(1)  # noqa: SLF001 # documented
    if error is None or (trace := error.__traceback__) is None or trace.tb_frame is not engine:
        stack.close()
    else:
        stack.__exit__(type(error), error, trace)


def _entered(outputs: Sequence[Any], args: Sequence[Any], named: dict[str, Any]) -> ExitStack:
    call = BackwardCall(
        outputs,
        args[2] if len(args) > 2 else True,  # noqa: PLR2004 # by position
        args[3] if len(args) > 3 else (),  # noqa: PLR2004 # by position
        bool(named.get("accumulate_grad")),
    )
    for act in tuple(_before):
        act(call)
    with ExitStack() as stack:
        for context in tuple(_around):
            stack.enter_context(context(call))
        if _torch.graph_task() == -1:
            _running.append(call)
            stack.callback(_running.remove, call)
        return stack.pop_all()


@_uncompiled
def _with_a_frame(run: Callable[..., Any], outputs: Sequence[Any], *args: Any, **named: Any) -> Any:
    with _entered(outputs, args, named):
        return run(outputs, *args, **named)
