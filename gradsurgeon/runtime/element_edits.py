"""The effects of rules that edit each element by itself, and keep some as they are while an optimizer updates others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.actions import At, Edit, MaskedUpdate, Shard
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime.effect import Bound, Effect, WeightUpdate
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.scaler_watch import in_true_units, unscaled
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist, _numbers

Apply = Callable[[Tensor], Tensor]


class ElementEdit(Effect):
    """Edits each element by itself. In observe mode it edits copies, to count what it would change."""

    edits = True
    compiled: Edit

    @property
    def asks_host(self) -> bool:  # type: ignore[override] # edits of gradients cannot be taken back
        return self.moment == "step"

    def refusals(self) -> Iterator[str]:
        """Yield why the rule cannot act on what this rank holds of some parameters."""
        refuse = self.compiled.refuse
        if refuse is None:
            return
        for index, param in self.context.parameters.present_by_index(self.indices):
            if not _dist.is_sharded(param):
                continue
            name = self.context.names[index]
            try:
                refuse(_at(name, param, param, 0))
            except GradSurgeonError as error:
                yield f"{printable(name)}: {error}"

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        apply = self._apply_at(origin.name, origin.index, origin.step, tensor)
        if not origin.is_again:
            self.count_fired(origin.step)
            if not self.context.acts:
                self._count_changed(unscaled(tensor, origin.scale), apply)
        return _numbers.on_values(in_true_units(apply, origin.scale), tensor)

    def act(self, gradients: Gradients, bound: Bound) -> None:
        indices = gradients.having(bound.indices)
        if not indices:
            return
        if not self.keeps_zero:
            gradients.check_layouts(self.rule, indices)
        step = bound.counter.step
        compiled: Edit = self.compiled_at(step)
        is_observed = not self.context.acts
        knows_parts = compiled.takes_at and gradients.are_sharded
        one_by_one = is_observed or compiled.apply_ is None or knows_parts
        together: dict[int, Tensor] = {}
        edited = _dist.parts(gradients.writable(indices))
        for index, part in zip(indices, edited, strict=True):
            if not one_by_one and part.layout is torch.strided:
                together[index] = part
                continue
            apply = self._apply_at(self.context.names[index], index, step, part)
            if is_observed:
                self._count_changed(part, apply)
            # `copy_` keeps the tensor object, so the optimizer and the script see the edit.
            part.copy_(_numbers.on_values(apply, part))
        if together:
            self.edit_in_place([*together], [*together.values()], step)
        self.count_fired(step, len(indices))

    def edit_in_place(self, indices: Sequence[int], tensors: Sequence[Tensor], step: int) -> None:
        """Edit whole tensors of parameters without other owners, by the form for many tensors."""
        compiled: Edit = self.compiled_at(step)
        assert compiled.apply_ is not None  # noqa: S101 # the caller has asked
        given = (self.context.names_of(indices), step) if compiled.takes_at else ()
        compiled.apply_(tensors, *given)

    def _apply_at(self, name: str, index: int, step: int, grad: Tensor) -> Apply:
        """Return the arithmetic for one tensor; ``index`` is the parameter, -1 for other tensors."""
        compiled: Edit = self.compiled_at(step)
        given: tuple[At, ...] = ()
        if compiled.takes_at:
            param = self.context.parameters.param(index) if index >= 0 else None
            given = (_at(name, param, grad, step),)

        def apply(values: Tensor) -> Tensor:
            try:
                edited = compiled.apply(values, *given)
                _check_result(values, edited)
            except Exception as error:
                place = f"rule {self.rule.id}: {printable(name)}, step {step}"
                if isinstance(error, GradSurgeonError):
                    raise GradSurgeonError(f"{place}: {error}") from error
                # It keeps its type: torch leaves a checkpointed pass by an error, and scripts catch a lack of memory.
                error.add_note(place)
                raise
            return edited

        return apply

    def _count_changed(self, grad: Tensor, apply: Apply) -> None:
        """Count whether the edit would change an element. Does not wait for a device."""
        with torch.no_grad():
            elements = _numbers.values(grad)
            changes = _numbers.differs(elements, apply(elements)).any()
        self.count_changed(changes)


def _check_result(values: Tensor, edited: object) -> None:
    if not isinstance(edited, Tensor):
        raise TypeError(f"the edit must return a tensor, it returned {type(edited).__name__}")
    if edited.shape != values.shape or edited.dtype != values.dtype:
        wanted = f"{list(values.shape)} {values.dtype}"
        raise ValueError(
            f"the edit must return {wanted}, it returned {list(edited.shape)} {edited.dtype}"
        )


class MaskedEdit(ElementEdit):
    """Edits each element by itself, and keeps elements as they are during the update: weights and what the optimizer keeps."""

    holds = True
    compiled: MaskedUpdate

    def prepare(self) -> None:
        # The parameters of the updates that run: which elements train, and copies of weight and state.
        self._held: dict[StepCounter, list[_Held]] = {}

    def before_edits(self, update: WeightUpdate, bound: Bound, gradients: Gradients | None) -> None:
        optimizer = update.optimizer()
        if gradients is None or optimizer is None or not self.context.acts:
            return
        held = []
        # Also parameters without a gradient, because rules on weights act on them.
        for index, param in self.context.parameters.present_by_index(bound.indices):
            at = _at(self.context.names[index], param, param, update.counter.step)
            assert at.weight is not None  # noqa: S101 # of this parameter
            copies = {name: part.clone() for name, part in _kept_of(optimizer, param)}
            held.append(_Held(index, param, self.compiled.trains(at.weight, at), copies))
        self._held[bound.counter] = held

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        held = self._held.pop(bound.counter, ())
        optimizer = update.optimizer()
        # A step that raises may have moved weights before.
        if optimizer is None or not (update.took_place or update.raised):
            return
        with torch.no_grad():
            for each in held:
                # Rules on weights act next.
                index = each.param_index
                update.trains[index] = each.trains & update.trains.get(index, True)
                for name, part in _kept_of(optimizer, each.param):
                    # The optimizer may have made its state in this update.
                    before = each.copies.get(name, part.new_zeros(()))
                    part.copy_(torch.where(each.trains, part, before))


class _Held(NamedTuple):
    param_index: int
    param: Tensor
    trains: Tensor
    copies: dict[str, Tensor]


def _kept_of(optimizer: Optimizer, param: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter, and what its optimizer keeps for each element of it; of shards the parts that this rank holds."""
    yield "", _dist.local(param).detach()
    for name, kept in optimizer.state.get(param, {}).items():
        if isinstance(kept, Tensor) and kept.shape == param.shape:
            yield str(name), _dist.local(kept).detach()


def _at(name: str, param: Tensor | None, grad: Tensor, step: int) -> At:
    """Return where an edit acts: with the part of a parameter that belongs to the stored elements of a gradient."""
    if param is None:
        return At(name, None, step, None)
    weight = _dist.local(param).detach()
    places = _dist.places(param)
    is_sparse = grad.layout is not torch.strided
    if is_sparse:
        # A sparse gradient stores whole rows.
        (rows,) = grad.coalesce().indices()
        weight = weight[rows]
        if not places:
            places = [torch.arange(size, device=grad.device) for size in param.shape]
        places[0] = places[0].to(rows.device)[rows]
    shard = None
    if places:
        shard = Shard(tuple(param.shape), tuple(places), is_sparse)
    return At(name, weight, step, shard)
