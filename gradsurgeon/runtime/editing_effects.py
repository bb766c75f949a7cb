"""The effects of rules that change gradients and values, or hide gradients from an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.actions import At, ByNorm, Edit, MaskedUpdate, Rule, Shard
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Bound, Effect, WeightUpdate
from gradsurgeon.runtime.gradients import LEFT_ALONE, Gradients
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.scaler_watch import in_true_units, unscaled
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist, _numbers, _torch

Apply = Callable[[Tensor], Tensor]


class ElementEdit(Effect):
    """Edits each element by itself. In observe mode it edits copies, to count what it would change."""

    edits = True
    compiled: Edit

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        apply = self._apply_at(origin.name, origin.index, origin.step, tensor)
        if not origin.is_again:
            self.log.count_fired(self.rule.id, origin.step)
            if self.context.mode == "observe":
                self._count_changed(unscaled(tensor, origin.scale), apply)
        return _numbers.on_values(in_true_units(apply, origin.scale), tensor)

    def act(self, gradients: Gradients, bound: Bound) -> None:
        indices = gradients.having(bound.indices)
        if not indices:
            return
        if not self.keeps_zero:
            gradients.check_layouts(self.rule, indices)
        edited = _dist.parts(gradients.writable(indices))
        step = bound.counter.step
        in_place = self.compiled_at(step).apply_
        together = []
        for index, part in zip(indices, edited, strict=True):
            is_together = in_place is not None and part.layout is torch.strided
            if is_together:
                together.append(part)
            if is_together and self.context.mode == "act":
                continue
            apply = self._apply_at(self.context.names[index], index, step, part)
            if self.context.mode == "observe":
                self._count_changed(part, apply)
            if not is_together:
                # `copy_` keeps the tensor object, so the optimizer and the script see the edit.
                part.copy_(_numbers.on_values(apply, part))
        if in_place is not None and together:
            in_place(together)
        self.log.count_fired(self.rule.id, step, len(indices))

    def _apply_at(self, name: str, index: int, step: int, grad: Tensor) -> Apply:
        """Return the arithmetic for one tensor; ``index`` is the parameter, -1 for other tensors."""
        compiled: Edit = self.compiled_at(step)
        if not compiled.takes_at:
            return compiled.apply
        param = None
        if index >= 0:
            param = self.context.parameters.param(index)
        weight, shard = _part_of(param, grad)
        at = At(name, weight, step, shard)
        return lambda values: compiled.apply(values, at)

    def _count_changed(self, grad: Tensor, apply: Apply) -> None:
        """Count whether the edit would change an element. Does not wait for a device."""
        with torch.no_grad():
            elements = _numbers.values(grad)
            changes = _numbers.differs(elements, apply(elements)).any()
        self.log.count_changed(self.rule.id, changes)


class MaskedEdit(ElementEdit):
    """Edits each element by itself, and keeps elements as they are during the update: weights and what the optimizer keeps."""

    holds = True
    compiled: MaskedUpdate

    def __init__(
        self, rule: Rule, context: Context, indices: tuple[int, ...], compiled: MaskedUpdate
    ) -> None:
        super().__init__(rule, context, indices, compiled)
        # By parameter of the update that runs: which elements train, and copies of weight and state.
        self._held: dict[StepCounter, list[_Held]] = {}

    def before_edits(self, update: WeightUpdate, bound: Bound, gradients: Gradients | None) -> None:
        optimizer = update.optimizer()
        if gradients is None or optimizer is None or self.context.mode != "act":
            return
        held = []
        for index in gradients.having(bound.indices):
            param = self.context.parameters.param(index)
            if param is None:
                continue
            weight, shard = _part_of(param, param)
            assert weight is not None  # noqa: S101 # of this parameter
            at = At(self.context.names[index], weight, update.counter.step, shard)
            copies = {name: part.clone() for name, part in _kept_of(optimizer, param)}
            held.append(_Held(param, self.compiled.trains(weight, at), copies))
        self._held[bound.counter] = held

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        held = self._held.pop(bound.counter, ())
        optimizer = update.optimizer()
        if optimizer is None or not update.took_place:
            return
        with torch.no_grad():
            for each in held:
                for name, part in _kept_of(optimizer, each.param):
                    # The optimizer may have made its state in this update.
                    before = each.copies.get(name, part.new_zeros(()))
                    part.copy_(torch.where(each.trains, part, before))


class _Held(NamedTuple):
    param: Tensor
    trains: Tensor
    copies: dict[str, Tensor]


def _kept_of(optimizer: Optimizer, param: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter, and what its optimizer keeps for each element of it; of shards the parts that this rank holds."""
    yield "", _dist.local(param).detach()
    for name, kept in optimizer.state.get(param, {}).items():
        if isinstance(kept, Tensor) and kept.shape == param.shape:
            yield str(name), _dist.local(kept).detach()


def _part_of(param: Tensor | None, grad: Tensor) -> tuple[Tensor | None, Shard | None]:
    """Return the part of a parameter that belongs to the stored elements of a gradient, and where it lies in the whole."""
    if param is None:
        return None, None
    weight = _dist.local(param).detach()
    places = _dist.places(param)
    if grad.layout is torch.strided:
        if not places:
            return weight, None
        return weight, Shard(tuple(param.shape), tuple(places))
    # A sparse gradient stores whole rows.
    (rows,) = grad.coalesce().indices()
    if not places:
        places = [torch.arange(size, device=grad.device) for size in param.shape]
    places[0] = places[0].to(rows.device)[rows]
    return weight[rows], Shard(tuple(param.shape), tuple(places))


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
        if self.compiled.group is not None and gradients.hidden:
            indices = [index for index in having if index not in gradients.hidden]
        if indices:
            self._shorten(gradients, indices, bound.counter.step)
        if having:
            self.log.count_fired(self.rule.id, bound.counter.step, len(having))

    def _shorten(self, gradients: Gradients, indices: Sequence[int], step: int) -> None:
        by_norm: ByNorm = self.compiled_at(step)
        norms = gradients.norms(indices, by_norm.order)
        for group, norms_of_group in self._grouped(by_norm, indices, norms):
            self._shorten_group(by_norm, gradients, group, norms_of_group, step)

    def _grouped(
        self, by_norm: ByNorm, indices: Sequence[int], norms: Tensor
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield gradients with their norms, or with the one norm that they share."""
        if by_norm.group is None:
            yield indices, norms
            return
        groups: dict[str, list[int]] = {}
        for position, index in enumerate(indices):
            group = by_norm.group(self.context.names[index])
            groups.setdefault(group, []).append(position)
        for positions in groups.values():
            shared = norms
            if len(groups) > 1:
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
        rule = self.rule.id
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
    holds = True

    def act(self, gradients: Gradients, bound: Bound) -> None:
        indices = gradients.having(bound.indices)
        if indices:
            self.log.count_changed(self.rule.id, len(indices))
            self.log.count_fired(self.rule.id, bound.counter.step, len(indices))
