"""The effect of rules that edit weights once an update is over, or what the update has changed in them."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsurgeon.actions import Edit, Rule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Bound, WeightUpdate
from gradsurgeon.runtime.element_edits import ElementEdit
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist


class WeightEdit(ElementEdit):
    """Edits each element of a weight, or of its change, where the update took place."""

    def __init__(
        self, rule: Rule, context: Context, indices: tuple[int, ...], compiled: Edit
    ) -> None:
        super().__init__(rule, context, indices, compiled)
        self._of_changes = rule.ref.side == "update"
        # Maps each parameter to what this rank held of it before the update that runs now; empty where only weights are edited.
        self._before: dict[StepCounter, dict[int, Tensor]] = {}

    def before_step(self, update: WeightUpdate, bound: Bound) -> None:
        # If a script updates weights by hand, the session does not see when.
        if update.optimizer() is None:
            return
        before: dict[int, Tensor] = {}
        if self._of_changes:
            before = {index: part.clone() for index, part in self._parts_of(bound)}
        self._before[bound.counter] = before

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        before = self._before.pop(bound.counter, None)
        if before is None or not update.took_place:
            return
        step = bound.counter.step
        count = 0
        with torch.no_grad():
            for index, part in self._parts_of(bound):
                is_new = self._of_changes and index not in before
                if is_new or index in update.hidden_by:
                    continue
                self._edit(update, index, part, before.get(index), step)
                count += 1
        self.log.count_fired(self.rule.id, step, count)

    def _edit(
        self, update: WeightUpdate, index: int, part: Tensor, before: Tensor | None, step: int
    ) -> None:
        """Edit a weight, or with ``before`` what the update has changed in it."""
        old = part
        if before is not None:
            old = part - before
        apply = self._apply_at(self.context.names[index], index, step, old)
        if self.context.mode == "observe":
            self._count_changed(old, apply)
            return
        new = apply(old)
        if before is not None:
            new = before + new
        if update.overflow is not None:
            # Only the device knows whether a fused update took place.
            new = torch.where(update.overflow.to(part.device) > 0, part, new)
        part.copy_(new)

    def _parts_of(self, bound: Bound) -> list[tuple[int, Tensor]]:
        params = self.context.parameters.present_by_index(bound.indices)
        return [(index, _dist.local(param.detach())) for index, param in params]
