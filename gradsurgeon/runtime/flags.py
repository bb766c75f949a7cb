"""Flags of tensors of modules and tags: how many non-finite elements each had when it came into being."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors._torch import uncompiled


@dataclass(slots=True)
class Flag:
    """The number of non-finite elements of one tensor when the tensor came into being."""

    what: str
    name: str
    counter: Callable[[], StepCounter]
    # An int if the host could read it without waiting.
    count: Tensor | int
    # Whether the tensor takes part in an update: a gradient always does, a value once a backward pass reaches it.
    fed: bool
    # For a value: an object that lives as long as a backward pass can reach the value.
    graph: weakref.ref[object] | None = None
    # True for a leaf, such as a batch, in a forward pass with gradients. No hook is on a leaf, so the next
    # backward pass decides.
    waits: bool = False

    @property
    def can_feed(self) -> bool:
        """Whether a backward pass can still reach the tensor."""
        return self.waits or (self.graph is not None and self.graph() is not None)

    @property
    def could_feed(self) -> bool:
        """Whether a backward pass could ever reach the tensor."""
        return self.fed or self.waits or self.graph is not None

    def follow(self, tensor: Tensor) -> None:
        """Notice whether a value takes part in an update."""
        if self.fed or not torch.is_grad_enabled():
            return
        # A leaf gets no hook: the hooks of all passes would pile up on it.
        if tensor.is_leaf or not tensor.requires_grad:
            self.waits = True
            return
        hook = _FeedsHook(self)
        self.graph = weakref.ref(hook)
        _torch.register_hook(tensor, hook)


class _FeedsHook:
    """Tensor hook that marks a flag once the flagged value takes part in a backward pass."""

    __torch_unserializable__ = True

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    @uncompiled
    def __call__(self, _grad: Tensor | None) -> None:
        self._flag.fed = True
