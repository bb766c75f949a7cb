"""Predicts whether an edit changes a tensor, if the tensor is on the host, where reading it is free.

Most bounds change nothing in most steps. An unchanged tensor need not be written, nor checked for other
holders of its memory. On a device the prediction would wait for the device, so every edit runs there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon import _numbers, _torch
from gradsurgeon.actions import ByNorm, Edit, Rule
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.context import Context
from gradsurgeon.tensors.loss_scale import unscaled

LEFT_ALONE = "the norm is not finite: the gradients were left alone"


def changes(edit: Edit, grad: Tensor) -> bool | Tensor:
    """Return whether an edit would change an element; on a device, as an unread 0-dim bool tensor."""
    elements = _numbers.values(grad)
    if edit.decided is None or not _torch.is_host(grad) or grad.is_complex():
        return edit.alters(elements)
    if not elements.numel():
        # An empty tensor has no range, and bounds that exclude 0 would trigger on an invented range.
        return False
    answer = edit.decided(*_numbers.ends(elements), grad.dtype)
    return bool(edit.alters(elements)) if answer is None else answer


def changed(edit: Edit, grads: Sequence[Tensor]) -> list[bool | Tensor]:
    """Return the result of `changes` for several gradients, in fewer calls."""
    # An edit with `decided` works elementwise, so it can run on the elements of all gradients in one tensor.
    # An edit that changes a large gradient mostly changes one of its first elements.
    together = edit.decided is not None and all(map(_torch.is_host, grads))
    # An element that changes in the widest dtype need not change in a narrower dtype.
    together = together and len({grad.dtype for grad in grads}) == 1
    first = _numbers.first_elements(grads) if together else grads
    joined = _numbers.small(first) if together else None
    if joined is None:
        return [changes(edit, grad) for grad in grads]
    flat, lengths = joined
    edited = edit.apply(flat)
    differs = edited.ne(flat)
    if edited.isnan().any():
        differs &= ~(edited.isnan() & flat.isnan())
    biting = _numbers.by_segments(differs.to(flat.dtype), "sum", lengths).bool().tolist()
    return [
        bites or (part is not grad and changes(edit, grad))
        for grad, part, bites in zip(grads, first, biting, strict=True)
    ]


def check_layout(rule: Rule, grad: Tensor, name: str) -> None:
    """Refuse an edit that would fill a sparse gradient, which binding could not foresee."""
    if grad.layout != torch.strided and not rule.keeps_zero:
        raise GradSurgeonError(
            f"rule {rule.id}: the gradient of {name} is sparse and the bounds exclude 0, so the result "
            "would be dense; include 0 in the bounds, or `exclude` the parameter"
        )


class NormClip:
    """Clips one tensor of any layout by its norm, out of place: autograd may share the tensor."""

    def __init__(self, by_norm: ByNorm, tensor: Tensor, scale: Tensor | None) -> None:
        with torch.no_grad():
            self._norm = _numbers.norm(unscaled(tensor, scale), by_norm.order)
            factor = by_norm.factor(self._norm)
        # On a device the factor stays unread.
        self._factor: float | Tensor = float(factor) if _torch.is_host(factor) else factor

    def of(self, tensor: Tensor) -> Tensor:
        if isinstance(self._factor, float) and not self._factor < 1.0:
            return tensor
        return _numbers.on_values(self._times, tensor)

    def _times(self, values: Tensor) -> Tensor:
        if isinstance(self._factor, float):
            return values * self._factor
        # Half precision would round the factor. Two 0-dim tensors promote to the wider dtype, so the result is cast.
        wide = _numbers.in_float32(values)
        return (wide * self._factor).to(values.dtype)

    def tell(self, context: Context, rule: str, step: int) -> None:
        context.event_log.count_changed(rule, self._factor < 1.0)
        if not isinstance(self._factor, float) or self._factor == 1.0:
            spoilt = self._norm.isfinite().logical_not_()
            context.event_log.emit_if(spoilt, LEFT_ALONE, rule=rule, step=step)
