"""Loss scaling: what a gradient is worth while a `GradScaler` has its scale on it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon import _torch
from gradsurgeon.runtime.compiled import in_backward


class Scaling:
    """Which gradients of a session carry the scale of a `GradScaler`, and which scale.

    A process can train several models with several scalers, or one of them without any. So each
    backward pass is asked for itself: it carries a scale where it began at a loss that was scaled.

    Args:
        scaler: the one the caller has named; others are then none of the session's business.
    """

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self._named = None if scaler is None else weakref.ref(scaler)
        # A named scaler may be asked for its scale only, and the loss be multiplied by hand.
        self._by_hand = scaler is not None
        # Running backward passes that began at a scaled loss, by graph task. Nothing but the pass keeps
        # them: one that raises ends as well.
        self._running: WeakValueDictionary[int, _Scaled] = WeakValueDictionary()
        # But compiled autograd runs nothing at the end of a pass, and so keeps nothing.
        self._kept: _Scaled | None = None
        # The scaler that is stepping an optimizer, or about to decide that it does not.
        self._stepping: weakref.ref[GradScaler] | None = None
        # The scale on the gradients that the step point is about to see; fused optimizers only.
        self.at_step: Tensor | None = None

    def _concerns(self, scaler: GradScaler) -> bool:
        return scaler.is_enabled() and (self._named is None or self._named() is scaler)

    def scaled(self, scaler: GradScaler, losses: Sequence[Tensor]) -> None:
        """Take notice of losses that a scaler has scaled: their backward passes carry its scale."""
        if not self._concerns(scaler):
            return
        self._by_hand = False
        own, by = weakref.ref(self), weakref.ref(scaler)

        @in_backward
        def begins(_grad: Tensor) -> None:
            scaling, scaler = own(), by()
            if scaling is not None and scaler is not None:
                scaling.began(scaler)

        for loss in losses:
            if loss.requires_grad:
                _torch.register_hook(loss, begins)

    def began(self, scaler: GradScaler) -> None:
        """Take notice of a backward pass that begins at a scaled loss."""
        task = _torch.graph_task()
        running = self._running[task] = _Scaled(_scale_of(scaler))
        if _torch.in_compiled_autograd():
            self._kept = running
        else:
            _torch.queue_callback(running)

    def stepped(self) -> None:
        """Forget the pass that led to a step."""
        self._kept = None

    @property
    def scale(self) -> Tensor | None:
        """The scale on the gradients of the running backward pass, as a 0-dim tensor: no wait."""
        if self._by_hand:
            scaler = self._named() if self._named is not None else None
            return None if scaler is None or not scaler.is_enabled() else scaler._scale  # noqa: SLF001
        if not self._running:
            return None
        found = self._running.get(_torch.graph_task())
        # A pass inside another one, as of reentrant checkpointing, has its gradients from that one.
        return (found or max(self._running.items())[1]).scale

    @contextmanager
    def steps(self, scaler: GradScaler) -> Iterator[None]:
        """Take notice of a scaler that is about to step an optimizer, or to leave it alone."""
        before = self._stepping
        self._stepping = weakref.ref(scaler) if self._concerns(scaler) else None
        try:
            yield
        finally:
            self._stepping = before

    @property
    def stepping(self) -> Tensor | None:
        """The scale of the scaler that is stepping an optimizer, as a 0-dim tensor."""
        scaler = self._stepping() if self._stepping is not None else None
        return None if scaler is None else _scale_of(scaler)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Scaled:
    """A running backward pass that carries a scale; the engine keeps it and calls it at the end."""

    scale: Tensor

    def __call__(self) -> None:
        """Do nothing: that it was kept is all."""


def _scale_of(scaler: GradScaler) -> Tensor:
    found: Tensor | None = scaler._scale  # noqa: SLF001 # `get_scale` waits for the device
    # It is made when the first loss is scaled.
    return torch.ones((), device="cpu") if found is None else found


def unscaled(grad: Tensor, scale: Tensor | None) -> Tensor:
    """Return a gradient in true units. Half precision becomes float32, which holds what is small."""
    if scale is None:
        return grad
    values = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    return values / scale.to(grad.device)


def in_true_units(
    edit: Callable[[Tensor], Tensor], scale: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return an edit that works on scaled gradients as ``edit`` does on true ones.

    Non-finite elements pass: the scaler must see its overflow, or it would never back off. The scale
    is a power of two, so that dividing by it loses nothing.
    """
    if scale is None:
        return edit

    def scaled(grad: Tensor) -> Tensor:
        out = edit(unscaled(grad, scale)) * scale.to(grad.device)
        return torch.where(grad.isfinite(), out.to(grad.dtype), grad)

    return scaled


def _tensors(found: object) -> Iterator[Tensor]:
    """Yield the tensors of what a scaler returns; what it makes of an iterator is not consumed."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


@contextmanager
def watched(
    on_scale: Callable[[GradScaler, Sequence[Tensor]], None],
    around_step: Callable[[GradScaler, Optimizer], AbstractContextManager[None]],
) -> Iterator[None]:
    """Take notice of every use of a scaler: there is no hook for it.

    Args:
        on_scale: called with a scaler and the losses that it has scaled.
        around_step: what to be in while a scaler steps an optimizer, or decides not to.
    """
    scale, step = GradScaler.scale, GradScaler.step

    @functools.wraps(scale)
    def scale_seen(self: GradScaler, outputs: Any) -> Any:
        found = scale(self, outputs)
        on_scale(self, list(_tensors(found)))
        return found

    @functools.wraps(step)
    def step_seen(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with around_step(self, optimizer):
            return step(self, optimizer, *args, **kwargs)

    GradScaler.scale, GradScaler.step = scale_seen, step_seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        GradScaler.scale, GradScaler.step = scale, step  # type: ignore[method-assign]
