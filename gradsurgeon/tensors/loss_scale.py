"""Arithmetic on gradients that a `GradScaler` has multiplied by its scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradsurgeon import _numbers


def unscaled(grad: Tensor, scale: Tensor | None) -> Tensor:
    """Return a gradient in true units. Half precision becomes float32, which holds small values."""
    if scale is None:
        return grad
    return _numbers.in_float32(grad) / scale.to(grad.device)


def in_true_units(
    edit: Callable[[Tensor], Tensor], scale: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return an edit that treats scaled gradients as ``edit`` treats true ones.

    Non-finite elements pass unchanged: the scaler must see its overflow, or it would never back off. The
    scale is a power of two, so dividing by it loses nothing.
    """
    if scale is None:
        return edit

    def scaled(grad: Tensor) -> Tensor:
        out = edit(unscaled(grad, scale)) * scale.to(grad.device)
        return torch.where(grad.isfinite(), out.to(grad.dtype), grad)

    return scaled
