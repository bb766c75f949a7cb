"""The effects of rules that change gradients and values, or hide gradients from an optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon.actions import ByNorm, Edit
from gradsurgeon.runtime.effect import Bound, Effect
from gradsurgeon.runtime.gradients import LEFT_ALONE, Gradients
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.scaler_watch import in_true_units, unscaled
from gradsurgeon.tensors import _dist, _numbers, _torch


class ElementEdit(Effect):
    """Edits each element by itself. In observe mode it edits copies, to count what it would change."""

    edits = True
    compiled: Edit

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        if not origin.is_again:
            self.log.count_fired(self.rule.id, origin.step)
            if self.context.mode == "observe":
                self._count_changed(unscaled(tensor, origin.scale))
        return _numbers.on_values(in_true_units(self.compiled.apply, origin.scale), tensor)

    def act(self, gradients: Gradients, bound: Bound) -> None:
        indices = gradients.having(bound.indices)
        if not indices:
            return
        if not self.keeps_zero:
            gradients.check_layouts(self.rule, indices)
        edited = _dist.parts(gradients.writable(indices))
        if self.context.mode == "observe":
            for part in edited:
                self._count_changed(part)
        dense = [grad for grad in edited if grad.layout is torch.strided]
        if dense:
            self.compiled.apply_(dense)
        if len(dense) < len(edited):
            for grad in edited:
                if grad.layout is not torch.strided:
                    # `copy_` keeps the tensor object, so the optimizer and the script see the edit.
                    grad.copy_(_numbers.on_values(self.compiled.apply, grad))
        self.log.count_fired(self.rule.id, bound.counter.step, len(indices))

    def _count_changed(self, grad: Tensor) -> None:
        """Count whether the edit would change an element. Does not wait for a device."""
        with torch.no_grad():
            elements = _numbers.values(grad)
            changes = _numbers.differs(elements, self.compiled.apply(elements)).any()
        self.log.count_changed(self.rule.id, changes)


class NormEdit(Effect):
    """Multiplies gradients by a function of their norm."""

    edits = True
    measures = True
    compiled: ByNorm

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        with torch.no_grad():
            norm = _numbers.norm(unscaled(tensor.detach(), origin.scale), self.compiled.order)
            factors = self.compiled.factor(norm)
        # On a device the factor stays unread.
        factor = float(factors) if _torch.is_host(factors) else factors
        if not origin.is_again:
            self._count(norm, factor, origin.step)
        if isinstance(factor, float) and not factor < 1.0:
            return tensor
        return _numbers.on_values(lambda values: _times(values, factor), tensor)

    def _count(self, norm: Tensor, factor: float | Tensor, step: int) -> None:
        rule = self.rule.id
        self.log.count_fired(rule, step)
        self.log.count_changed(rule, factor < 1.0)
        if not isinstance(factor, float) or factor == 1.0:
            nonfinite = norm.isfinite().logical_not_()
            self.log.emit_if(nonfinite, LEFT_ALONE, rule=rule, step=step)

    def act(self, gradients: Gradients, bound: Bound) -> None:
        having = gradients.having(bound.indices)
        if not self.keeps_zero:
            gradients.check_layouts(self.rule, having)
        indices = having
        # A hidden gradient does not count in a norm over all.
        if self.compiled.over_rule and gradients.hidden:
            indices = [index for index in having if index not in gradients.hidden]
        if indices:
            self._shorten(gradients, indices, bound.counter.step)
        if having:
            self.log.count_fired(self.rule.id, bound.counter.step, len(having))

    def _shorten(self, gradients: Gradients, indices: Sequence[int], step: int) -> None:
        by_norm = self.compiled
        rule = self.rule.id
        norms = gradients.norms(indices, by_norm.order)
        if by_norm.over_rule:
            norms = _numbers.over(norms, by_norm.order)
        factors = by_norm.factor(norms)
        is_counted = gradients.shorten(rule, indices, factors)
        if is_counted:
            self._mention_nonfinite(norms, step)
            return

        def count(norms: Tensor) -> None:
            self._mention_nonfinite(norms, step)
            shorter = by_norm.factor(norms).expand(len(indices)) < 1.0
            self.log.count_changed(rule, shorter.sum())

        # Events and counts are computed on the host; norms of a device arrive there later.
        self.log.when_read(norms, count)

    def _mention_nonfinite(self, norms: Tensor, step: int) -> None:
        # A sum of float32 numbers does not overflow in Python.
        if not math.isfinite(sum(norms.tolist())):
            self.log.emit("notice", LEFT_ALONE, rule=self.rule.id, step=step)


def _times(values: Tensor, factor: float | Tensor) -> Tensor:
    if isinstance(factor, float):
        return values * factor
    # Half precision would round the factor. Two 0-dim tensors promote to the wider dtype, so the result is cast.
    wide = _numbers.in_float32(values)
    return (wide * factor).to(values.dtype)


class Hide(Effect):
    """Counts gradients that the optimizer does not find: by `Due.hidden_by` it steps without them."""

    hides = True

    def act(self, gradients: Gradients, bound: Bound) -> None:
        indices = gradients.having(bound.indices)
        if indices:
            self.log.count_changed(self.rule.id, len(indices))
            self.log.count_fired(self.rule.id, bound.counter.step, len(indices))
