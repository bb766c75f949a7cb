"""The rules at `step`: final gradients, edited in place right before an update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon.actions import ByNorm, CaptureRule, Edit, EditRule, FreezeRule, ObserverRule
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.accumulated_rules import keep
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.edit_effect import can_decide, changes, decide
from gradsurgeon.runtime.final_gradients import FinalGradients
from gradsurgeon.runtime.norm_clip import LEFT_ALONE
from gradsurgeon.runtime.param_hooks import check_layout
from gradsurgeon.runtime.step_counter import StepCounter


class StepRules:
    """Runs the rules at `step` in file order on the gradients that an update is about to consume."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # Gradients that were edited as final ones at the end of a pass, before an optimizer turned up
        # that is about to consume them, unless the script assigns others.
        self._spared: dict[int, weakref.ref[Tensor]] = {}

    def run(
        self, counter: StepCounter, gradients: FinalGradients, scale: Tensor | None, *, acting: bool
    ) -> set[int]:
        """Act on the gradients of one clock.

        Args:
            counter: that of the optimizer.
            gradients: its gradients.
            scale: what a `GradScaler` has multiplied them by, where the optimizer divides by it.
            acting: whether the update takes place; where it does not, there is nothing to edit.

        Returns:
            The tensors that an edit may have made non-finite.
        """
        context = self._context
        due_rules = context.due_rules(counter)
        spared = {i: self._spared.pop(i) for i in due_rules.edited.intersection(self._spared)}
        same = {i for i, grad in spared.items() if i in gradients and gradients[i] is grad()}
        edited = due_rules.edited - same if acting else frozenset()
        suspicious: set[int] = set()
        with torch.no_grad():
            gradients.unscale(edited)
            try:
                for bound_rule in due_rules.at_step:
                    having = gradients.having(bound_rule.tensors)
                    if isinstance(bound_rule.rule, EditRule):
                        having = [tensor for tensor in having if tensor in edited]
                    if having:
                        self._one(bound_rule, gradients, having)
                        if not isinstance(bound_rule.rule, CaptureRule):  # counts by itself
                            context.event_log.fired(bound_rule.rule.id, counter.step, len(having))
                        if bound_rule.rule.may_overflow and context.mode == "act":
                            suspicious.update(having)
            finally:
                gradients.rescale(scale)
        return suspicious

    def arrived(self, tensors: Iterable[int]) -> None:
        """Note that gradients have got something that no rule at the step has seen."""
        for tensor in tensors:
            self._spared.pop(tensor, None)

    def spare(self, edited: Mapping[int, weakref.ref[Tensor]]) -> None:
        """Leave gradients alone in the next update that have been edited for it already."""
        self._spared.update(edited)

    def _one(
        self, bound_rule: BoundRule, gradients: FinalGradients, tensors: Sequence[int]
    ) -> None:
        context, rule = self._context, bound_rule.rule
        if isinstance(rule, ObserverRule):
            self._log(bound_rule, gradients, tensors)
        elif isinstance(rule, CaptureRule):
            keep(context, bound_rule, {tensor: gradients[tensor] for tensor in tensors}, None)
        elif isinstance(rule, FreezeRule):
            context.event_log.altered(rule.id, len(tensors))
        else:
            edit = context.edits[rule.id]
            if not rule.keeps_zero:
                for tensor in tensors:
                    check_layout(rule, gradients[tensor], context.program.names[tensor])
            if edit.by_norm is not None:
                self._by_norm(bound_rule, edit.by_norm, gradients, tensors)
            else:
                self._elementwise(bound_rule, edit, gradients, tensors)

    def _elementwise(
        self, bound_rule: BoundRule, edit: Edit, gradients: FinalGradients, tensors: Sequence[int]
    ) -> None:
        event_log, rule = self._context.event_log, bound_rule.rule
        parts = {tensor: _dist.local(gradients[tensor]) for tensor in tensors}
        known = [tensor for tensor, part in parts.items() if can_decide(edit, part)]
        ranges = _numbers.ranges([parts[tensor] for tensor in known])
        biting = [
            tensor
            for tensor, ends in zip(known, ranges, strict=True)
            if decide(edit, parts[tensor], ends)
        ]
        event_log.altered(rule.id, len(biting))
        blind = [tensor for tensor, part in parts.items() if not can_decide(edit, part)]
        for tensor in blind:
            event_log.altered(rule.id, changes(edit, parts[tensor]))
        # Whether a gradient has changed must be the same on all ranks that share it: one that measured
        # it again would wait for the others. So all write, be it for nothing.
        bitten = set(biting)
        for_all = [t for t in known if t not in bitten and _dist.is_sharded(gradients[t])]
        written = biting + for_all + blind
        _apply(edit, [_dist.local(grad) for grad in gradients.writable(written)])

    def _by_norm(
        self, bound_rule: BoundRule, edit: ByNorm, gradients: FinalGradients, tensors: Sequence[int]
    ) -> None:
        context, rule = self._context, bound_rule.rule
        event_log = context.event_log
        if edit.over_rule:
            # What is hidden from the optimizer in this step is not consumed.
            frozen = context.due_rules(bound_rule.counter).frozen
            tensors = [tensor for tensor in tensors if tensor not in frozen]
            if not tensors:
                return
        norms = gradients.norms(tensors, edit.order)
        if edit.over_rule:
            norms = torch.linalg.vector_norm(norms, edit.order, keepdim=True)
        spoilt = norms.isfinite().logical_not_().any()
        event_log.later(spoilt, LEFT_ALONE, rule=rule.id, step=bound_rule.counter.step)
        factors = edit.factor(norms)
        if not _torch.is_host(factors):
            event_log.altered(rule.id, (factors.expand(len(tensors)) < 1.0).sum())
            self._shorten(gradients.writable(tensors), factors)
            return
        values = factors.tolist()
        if not min(values) < 1.0:
            return
        if len(values) < len(tensors):  # one for all
            values *= len(tensors)
        biting = [
            (tensor, factor) for tensor, factor in zip(tensors, values, strict=True) if factor < 1.0
        ]
        event_log.altered(rule.id, len(biting))
        own = [tensor for tensor, _ in biting]
        self._shorten(gradients.writable(own), [factor for _, factor in biting])

    @staticmethod
    def _shorten(grads: Sequence[Tensor], factors: Tensor | Sequence[float]) -> None:
        """Multiply gradients by a factor each, or by one for all that is still on a device."""
        parts = [_dist.local(grad) for grad in grads]
        if not isinstance(factors, Tensor):
            same = len(set(factors)) == 1
            torch._foreach_mul_(parts, factors[0] if same else list(factors))
            return
        if len(factors) == 1:
            _numbers.multiply_(parts, factors)
            return
        for part, factor in zip(parts, factors.unsqueeze(1).unbind(), strict=True):
            _numbers.multiply_([part], factor)

    def _log(
        self, bound_rule: BoundRule, gradients: FinalGradients, tensors: Sequence[int]
    ) -> None:
        columns = bound_rule.columns(tensors)
        for stat, key in bound_rule.keys.items():
            if stat == "l2":
                values = gradients.norms(tensors, 2.0)
            else:
                values = measure.statistics(stat, gradients.of(tensors))
            self._context.recorder.add(key, bound_rule.counter.step, columns, values, replace=True)


def _apply(edit: Edit, grads: list[Tensor]) -> None:
    dense = [grad for grad in grads if grad.layout == torch.strided]
    if dense:
        edit.apply_(dense)
    for grad in grads:
        if grad.layout != torch.strided:
            # In place for the outside: the optimizer and the script keep seeing the same tensor.
            grad.copy_(_numbers.on_values(edit.apply, grad))
