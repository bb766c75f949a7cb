"""Edits that a norm decides on, of one tensor by itself: measured once, for all that is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsurgeon import _numbers, _torch
from gradsurgeon.actions import ByNorm
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.scaler_watch import unscaled

LEFT_ALONE = "the norm is not finite: the gradients were left alone"


class NormClip:
    """What a norm says of one tensor.

    Args:
        by_norm: what the norm decides.
        tensor: of any shape and layout; autograd may hand it to others as well.
        scale: what a `GradScaler` has multiplied it by.
    """

    def __init__(self, by_norm: ByNorm, tensor: Tensor, scale: Tensor | None = None) -> None:
        with torch.no_grad():
            self._norm = _numbers.norm(unscaled(tensor, scale), by_norm.order)
            factor = by_norm.factor(self._norm)
        # On a device it stays unread.
        self._factor: float | Tensor = float(factor) if _torch.is_host(factor) else factor

    def of(self, tensor: Tensor) -> Tensor:
        """Return the shortened tensor; what is left alone is itself."""
        if isinstance(self._factor, float) and not self._factor < 1.0:
            return tensor
        return _numbers.on_values(self._times, tensor)

    def _times(self, values: Tensor) -> Tensor:
        if isinstance(self._factor, float):
            return values * self._factor
        # Half precision would round the factor, and two 0-dim tensors take the wider dtype.
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        return (wide * self._factor).to(values.dtype)

    def tell(self, context: Context, rule: str, step: int) -> None:
        """Count the change, and note where a tensor was left alone because it could only do harm."""
        context.event_log.altered(rule, self._factor < 1.0)
        if not isinstance(self._factor, float) or self._factor == 1.0:
            spoilt = self._norm.isfinite().logical_not_()
            context.event_log.later(spoilt, LEFT_ALONE, rule=rule, step=step)
