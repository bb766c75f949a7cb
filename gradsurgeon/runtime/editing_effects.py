"""The effects of rules that shorten gradients by their norm, or hide gradients from an optimizer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

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
        for group, norms_of_group in self._grouped(by_norm, indices, norms):
            self._shorten_group(by_norm, gradients, group, norms_of_group, step)

    def _grouped(
        self, by_norm: ByNorm, indices: Sequence[int], norms: Tensor
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield gradients with their norms, or with the one norm that they share."""
        if not by_norm.joins:
            yield indices, norms
            return
        if by_norm.group is None:
            yield indices, _numbers.over(norms, by_norm.order)
            return
        groups = defaultdict(list)
        for position, index in enumerate(indices):
            group = by_norm.group(self.context.names[index])
            groups[group].append(position)
        for positions in groups.values():
            shared = norms[_torch.integers(tuple(positions), norms.device)]
            members = [indices[position] for position in positions]
            yield members, _numbers.over(shared, by_norm.order)

    def _shorten_group(
        self,
        by_norm: ByNorm,
        gradients: Gradients,
        indices: Sequence[int],
        norms: Tensor,
        step: int,
    ) -> None:
        factors = by_norm.factor(norms)
        is_counted = gradients.shorten(self.rule.id, indices, factors)
        outcome = gradients.outcome
        if is_counted:
            when_made(outcome, self._mention_nonfinite, norms, step)
            return

        def count(norms: Tensor) -> None:
            self._mention_nonfinite(norms, step)
            shorter = by_norm.factor(norms).expand(len(indices)) < 1.0
            self.count_changed(shorter.sum())

        # Events and counts are computed on the host; norms of a device arrive there later.
        when_made(outcome, self.log.when_read, norms, count)

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
