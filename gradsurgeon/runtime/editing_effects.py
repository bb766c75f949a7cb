"""The effects of rules that shorten gradients by their norm, or hide gradients from an optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon.actions import ByNorm
from gradsurgeon.runtime.device_outcome import when_judged, when_made
from gradsurgeon.runtime.effect import Bound, Effect
from gradsurgeon.runtime.gradients import LEFT_ALONE, Gradients
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.tensors import _numbers, _torch


class NormEdit(Effect):
    """Multiplies gradients by a function of their norm."""

    edits = True
    measures = True
    compiled: ByNorm

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        compiled = self.compiled_at(origin.step)
        with torch.no_grad():
            norm = _numbers.norm(unscaled(tensor.detach(), origin.scale), compiled.order)
            factors = compiled.factor(norm)
        # On a device the factor stays unread.
        factor = float(factors) if _torch.is_host(factors) else factors
        if not origin.is_again:
            self._count(norm, factor, origin.step)
        if isinstance(factor, float) and not factor < 1.0:
            return tensor
        return _numbers.on_values(lambda values: _times(values, factor), tensor)

    def _count(self, norm: Tensor, factor: float | Tensor, step: int) -> None:
        self.count_fired(step)
        self.count_changed(factor < 1.0)
        if not isinstance(factor, float) or factor == 1.0:
            nonfinite = norm.isfinite().logical_not_()
            self.log.emit_if(nonfinite, LEFT_ALONE, rule=self.rule.id, step=step)

    def act(self, gradients: Gradients, bound: Bound) -> None:
        having = gradients.having(bound.indices)
        if not self.keeps_zero:
            gradients.check_layouts(self.rule, having)
        indices = having
        # A hidden gradient does not count in a norm over all.
        if self.compiled.joins and gradients.hidden:
            indices = [index for index in having if index not in gradients.hidden]
        if indices:
            self._shorten(gradients, indices, bound.counter.step)
        if having:
            step = bound.counter.step
            when_made(gradients.outcome, self.count_fired, step, len(having))

    def _shorten(self, gradients: Gradients, indices: Sequence[int], step: int) -> None:
        by_norm: ByNorm = self.compiled_at(step)
        norms = gradients.norms(indices, by_norm.order)
        places: Sequence[int] = range(len(indices))
        if by_norm.joins:
            places = self._places(by_norm, indices)
            norms = _numbers.over(norms, places, by_norm.order)
        is_counted = gradients.shorten(self.rule.id, indices, places, by_norm.factor(norms))
        outcome = gradients.outcome
        if is_counted:
            when_made(outcome, self._mention_nonfinite, norms, step)
            return

        def count(norms: Tensor) -> None:
            self._mention_nonfinite(norms, step)
            factors = by_norm.factor(norms).tolist()
            self.count_changed(sum(factors[place] < 1.0 for place in places))

        # Events and counts are computed on the host; norms of a device arrive there later.
        when_made(outcome, self.log.when_read, norms, count)

    def _places(self, by_norm: ByNorm, indices: Sequence[int]) -> Sequence[int]:
        """Return the number of the group of each gradient; the gradients of a group share one norm."""
        if by_norm.group is None:
            return [0] * len(indices)
        numbers: dict[str, int] = {}
        places = []
        for index in indices:
            group = by_norm.group(self.context.names[index])
            places.append(numbers.setdefault(group, len(numbers)))
        return places

    def _mention_nonfinite(self, norms: Tensor, step: int) -> None:
        # A sum of float32 numbers does not overflow in Python.
        if not math.isfinite(sum(norms.tolist())):
            self.emit("notice", LEFT_ALONE, step=step)


def _times(values: Tensor, factor: float | Tensor) -> Tensor:
    if isinstance(factor, float):
        return values * factor
    # Half precision would round the factor. Two 0-dim tensors promote to the wider dtype, so the result is cast.
    wide = _numbers.in_float32(values)
    return (wide * factor).to(values.dtype)


class Hide(Effect):
    """Counts gradients that the optimizer does not find: by `Due.hidden_by` it steps without them."""

    hides = True
    holds = True

    def act(self, gradients: Gradients, bound: Bound) -> None:
        indices = gradients.having(bound.indices)
        if indices:
            when_judged(gradients.outcome, self._count, len(indices), bound.counter.step)

    def _count(self, number: int, step: int) -> None:
        self.count_changed(number)
        self.count_fired(step, number)
