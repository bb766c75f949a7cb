"""Calls functions before and around each backward pass that Python starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradsurgeon import _torch
from gradsurgeon._patching import Patch


@dataclass(frozen=True, slots=True, eq=False)
class BackwardCall:
    """One call of the engine: from ``outputs``, to ``inputs`` or all leaves; `torch.autograd.grad` does not accumulate."""

    outputs: Sequence[Any]
    inputs: Sequence[Any]
    accumulates: bool


Before = Callable[[BackwardCall], None]
# Runs the pass that it is given, and returns the result.
Around = Callable[[BackwardCall, Callable[[], Any]], Any]

_before: list[Before] = []
_around: list[Around] = []
_patches: list[Patch] = []
# The running passes, without passes that run inside another pass.
_running: list[BackwardCall] = []


def before(call: Before) -> Callable[[], None]:
    """Call a function before each backward pass, which may call `around` for it; return a function that ends this."""
    return _added(_before, call)


def around(runs: Around) -> Callable[[], None]:
    """Let a function run each backward pass; return a function that ends this."""
    return _added(_around, runs)


def is_only_grad() -> bool:
    """Tell whether passes run, and all of them are `torch.autograd.grad` calls."""
    return bool(_running) and not any(call.accumulates for call in _running)


def _added(watching: list[Any], one: object) -> Callable[[], None]:
    watching.append(one)
    if not _patches:
        # Every backward pass that Python starts calls this function.
        _patches.append(Patch(torch.autograd, "_engine_run_backward", _watched))

    def end() -> None:
        watching.remove(one)
        if not (_before or _around):
            _patches.pop().undo()

    return end


@_torch.uncompiled
def _watched(run: Callable[..., Any], outputs: Sequence[Any], *args: Any, **named: Any) -> Any:
    # By position, torch passes the gradients of the outputs, `retain_graph`, `create_graph` and the inputs.
    call = BackwardCall(outputs, args[3], bool(named.get("accumulate_grad")))
    for act in tuple(_before):
        act(call)
    passing = partial(_listed, call, partial(run, outputs, *args, **named))
    for runs in reversed(_around):
        passing = partial(runs, call, passing)
    return passing()


def _listed(call: BackwardCall, run: Callable[[], Any]) -> Any:
    if _torch.graph_task() != -1:
        return run()
    _running.append(call)
    try:
        return run()
    finally:
        _running.remove(call)
