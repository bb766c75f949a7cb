"""The gradients that a script keeps of activations by `retain_grad()`, which the pass of a single loss must not add to.

Autograd tells nobody which tensors of a graph keep theirs, so that calls of `retain_grad()` are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon._patching import Patch
from gradsurgeon.runtime.compile_support import uncompiled

_retained: Any = WeakTensorKeyDictionary()
_noting: list[ExitStack] = []


def note(*, wanted: bool) -> None:
    """Begin or end to note calls of `retain_grad()`: only sessions with rules on losses need them."""
    if wanted and not _noting:
        stack = ExitStack()
        # The patch goes first: nothing is noted after the notes are thrown away.
        stack.callback(_retained.clear)
        stack.callback(Patch(torch.Tensor, "retain_grad", _note).undo)
        _noting.append(stack)
    elif _noting and not wanted:
        _noting.pop().close()


# Compiled code would call the function on a tensor that stands for this one.
@uncompiled
def _note(original: Callable[..., None], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    original(tensor, *args, **kwargs)
    _retained[tensor] = None


@contextmanager
def put_back(loss: Tensor) -> Iterator[None]:
    """Leave the gradients that activations of one graph keep as they were before a pass through it."""
    # A copy of the references: another thread may note one meanwhile.
    alive = [tensor for ref in _retained.keyrefs() if (tensor := ref()) is not None]
    # Other threads may run passes through the graphs of other tensors.
    kept = [
        (one, one.grad)
        for one in alive
        if one.retains_grad and _is_reached(one.grad_fn, loss.grad_fn)
    ]
    try:
        yield
    finally:
        for tensor, grad in kept:
            tensor.grad = grad


def _is_reached(node: Any, start: Any) -> bool:
    pending, met = [start], {start}
    while pending and start is not None:
        one = pending.pop()
        if one is node:
            return True
        following = {other for other, _ in one.next_functions if other is not None} - met
        met |= following
        pending += following
    return False
