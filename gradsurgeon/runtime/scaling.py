"""Loss scaling: what a gradient is worth while a `GradScaler` has its scale on it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


class Scaling:
    """The scaler whose scale the gradients of a session carry, if there is one.

    Args:
        scaler: the one the caller has named; others are then none of the session's business.
    """

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self._named = scaler is not None
        self._scaler = None if scaler is None else weakref.ref(scaler)
        # The scale on the gradients that the step point is about to see; fused optimizers only.
        self.at_step: Tensor | None = None

    def used(self, scaler: GradScaler) -> bool:
        """Take notice of a scaler that scales a loss; tell whether it is the first one."""
        if self._named or not scaler.is_enabled():
            return False
        known = self._scaler is not None and self._scaler() is scaler
        self._scaler = weakref.ref(scaler)
        return not known

    @property
    def active(self) -> bool:
        """Whether losses are scaled."""
        scaler = self._scaler() if self._scaler is not None else None
        return scaler is not None and scaler.is_enabled()

    @property
    def scale(self) -> Tensor | None:
        """The scale on gradients during and after backward, as a 0-dim tensor: no wait."""
        scaler = self._scaler() if self._scaler is not None else None
        if scaler is None or not scaler.is_enabled():
            return None
        found: Tensor | None = scaler._scale  # noqa: SLF001 # `get_scale` waits for the device
        return found


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


@contextmanager
def watched(
    on_scale: Callable[[GradScaler], None],
    before_step: Callable[[], Any],
    after_step: Callable[[GradScaler, Optimizer, Any], None],
) -> Iterator[None]:
    """Take notice of every use of a scaler: there is no hook for it.

    Args:
        on_scale: called with a scaler that scales a loss.
        before_step: called before a scaler steps an optimizer, or decides not to.
        after_step: called after that, with what ``before_step`` returned.
    """
    scale, step = GradScaler.scale, GradScaler.step

    @functools.wraps(scale)
    def scale_seen(self: GradScaler, outputs: Any) -> Any:
        found = scale(self, outputs)
        on_scale(self)
        return found

    @functools.wraps(step)
    def step_seen(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        token = before_step()
        found = step(self, optimizer, *args, **kwargs)
        after_step(self, optimizer, token)
        return found

    GradScaler.scale, GradScaler.step = scale_seen, step_seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        GradScaler.scale, GradScaler.step = scale, step  # type: ignore[method-assign]
