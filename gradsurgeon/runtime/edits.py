"""The rules at `step`: final gradients, edited in place right before an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon.actions import ByNorm, Edit
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.agenda import Lane
from gradsurgeon.runtime.backward import LEFT_ALONE, check_layout
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.look import keep
from gradsurgeon.runtime.measure import pick
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.targets import Mark, mark


class StepEdits:
    """Runs the rules at `step` in file order on the gradients that an update is about to consume."""

    def __init__(self, state: State) -> None:
        self._state = state
        # What the edits left behind in this step. Where a closure is called again and computes no new
        # gradients, those that are still the same have had their turn.
        self._left: dict[int, Mark] = {}

    def run(self, clock: Clock) -> set[int]:
        """Act on the gradients of one clock.

        Returns:
            The tensors that an edit may have made non-finite.
        """
        state = self._state
        agenda = state.agenda(clock)
        lanes = agenda.at_step
        if not lanes:
            return set()
        tensors, grads = state.targets.grads(agenda.stepped)
        fresh = {
            tensor: grad
            for tensor, grad in zip(tensors, grads, strict=True)
            if self._left.get(tensor) != mark(grad)
        }
        suspicious: set[int] = set()
        acting = state.mode == "act"
        edited = {i for lane in lanes if lane.rule.role == "edit" for i in lane.tensors}
        with torch.no_grad(), self._in_place_of(fresh, edited if acting else set()) as mine:
            for lane in lanes:
                having = {i: mine[i] for i in lane.tensors if i in mine}
                if having:
                    self._one(lane, having)
                    if lane.rule.role != "capture":  # counts by itself
                        state.journal.fired(lane.rule.id, clock.step, len(having))
                    if lane.rule.may_overflow and acting:
                        suspicious |= having.keys()
        if acting:
            self._left.update((i, mark(grad)) for i, grad in mine.items() if i in edited)
        return suspicious

    @contextmanager
    def _in_place_of(
        self, grads: dict[int, Tensor], edited: set[int]
    ) -> Iterator[dict[int, Tensor]]:
        """Give the gradients to act on, in true units: those themselves that are edited for good."""
        scale = self._state.scaling.at_step
        if self._state.mode == "observe":
            grads = {tensor: grad.clone() for tensor, grad in grads.items()}
        elif edited:
            grads = {i: self._own(i, grad) for i, grad in self._shared(grads, edited).items()}
        if scale is None:
            yield grads
            return
        # A fused optimizer gets gradients with the scale on them. It is a power of two, so that
        # dividing and multiplying lose nothing.
        factors = {tensor: scale.to(grad.device) for tensor, grad in grads.items()}
        true = {i: g.div_(factors[i]) if i in edited else g / factors[i] for i, g in grads.items()}
        try:
            yield true
        finally:
            for tensor in edited & grads.keys():
                grads[tensor].mul_(factors[tensor])

    def spare(self, edited: dict[int, Mark]) -> None:
        """Leave gradients alone that have been edited as final ones already."""
        self._left.update(edited)

    def forget(self) -> None:
        """Forget what the edits left behind: the step is over.

        Marks must not outlive it. A new gradient is likely to get the address of the old one.
        """
        self._left.clear()

    def _one(self, lane: Lane, grads: dict[int, Tensor]) -> None:
        state = self._state
        if lane.rule.role == "observe":
            self._log(lane, grads)
        elif lane.rule.role == "capture":
            keep(state, lane, grads, None)
        elif lane.rule.role == "freeze":
            for grad in grads.values():
                state.journal.altered(
                    lane.rule.id, torch.ones((), dtype=torch.bool, device=grad.device)
                )
        else:
            for tensor, grad in grads.items():
                check_layout(lane.rule, grad, state.program.names[tensor])
            self._edit(lane, state.edits[lane.rule.id], grads)

    def _edit(self, lane: Lane, edit: Edit, grads: dict[int, Tensor]) -> None:
        state, rule = self._state, lane.rule
        if edit.by_norm is not None:
            self._by_norm(lane, edit.by_norm, grads)
            return
        parts = [_dist.local(grad) for grad in grads.values()]
        for part in parts:
            state.journal.altered(rule.id, edit.alters(_numbers.values(part)))
        _apply(edit, parts)

    def _by_norm(self, lane: Lane, edit: ByNorm, grads: dict[int, Tensor]) -> None:
        journal, rule = self._state.journal, lane.rule
        norms = pick(measure.norms(list(grads), list(grads.values()), edit.order), list(grads))
        if edit.over_rule:
            norms = torch.linalg.vector_norm(norms, edit.order)
        spoilt = norms.isfinite().logical_not_().any()
        journal.later(spoilt, LEFT_ALONE, rule=rule.id, step=lane.clock.step)
        factors = edit.factor(norms).expand(len(grads))
        for grad, factor in zip(grads.values(), factors.unbind(), strict=True):
            part = _dist.local(grad)
            on_device = factor.to(part.device)
            # In place, 0-dim tensors would take the wider dtype.
            part.copy_(part * on_device) if part.ndim == 0 else part.mul_(on_device)
        journal.altered(rule.id, (factors < 1.0).sum())

    def _log(self, lane: Lane, grads: dict[int, Tensor]) -> None:
        column = {tensor: number for number, tensor in enumerate(lane.tensors)}
        columns = [column[tensor] for tensor in grads]
        for stat, key in lane.keys.items():
            if stat == "l2":
                values = pick(measure.norms(list(grads), list(grads.values())), list(grads))
            else:
                values = measure.statistics(stat, list(grads.values()))
            self._state.recorder.add(key, lane.clock.step, columns, values, replace=True)

    def _shared(self, grads: dict[int, Tensor], edited: set[int]) -> dict[int, Tensor]:
        """Give each tensor a gradient of its own where two share memory, or the script holds it."""
        everything, all_grads = self._state.targets.grads(range(len(self._state.targets)))
        parts = [_dist.local(grad) for grad in all_grads]
        aliased = {everything[position] for position in _torch.overlapping(parts)}
        own = dict(grads)
        for tensor, grad in grads.items():
            if tensor not in edited:
                continue
            # A gradient with a graph (`create_graph=True`) is a value that the graph still needs.
            graph = grad.requires_grad or grad.grad_fn is not None
            # Parts of sharded gradients lie side by side in one buffer by design.
            lone = grad.layout == torch.strided and not _dist.is_sharded(grad)
            if graph or tensor in aliased or (lone and _torch.shares_storage(grad)):
                own[tensor] = grad.detach().clone()
            # A bound on addends is no bound on their sum.
            own[tensor] = _dist.settled(own[tensor])
        return own

    def _own(self, tensor: int, grad: Tensor) -> Tensor:
        param = self._state.targets.param(tensor)
        if param is not None and param.grad is not grad:
            param.grad = grad
        return grad


def _apply(edit: Edit, grads: list[Tensor]) -> None:
    dense = [grad for grad in grads if grad.layout == torch.strided]
    if dense:
        edit.apply_(dense)
    for grad in grads:
        if grad.layout != torch.strided:
            # In place for the outside: the optimizer and the script keep seeing the same tensor.
            grad.copy_(_numbers.on_values(edit.apply, grad))
