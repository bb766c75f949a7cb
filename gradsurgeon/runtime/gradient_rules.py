"""The rules on gradients: what is recorded after a pass, and what is edited right before an update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon.actions import ByNorm, CaptureRule, Edit, EditRule, FreezeRule, ObserverRule, Rule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.edit_effect import LEFT_ALONE, changed, check_layout
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.training_events import BackwardPass
from gradsurgeon.tensors.measure import Norms


@dataclass(frozen=True, slots=True)
class GradientSnapshot:
    done: BackwardPass
    parameters: Parameters
    tensors: Sequence[int]
    norms: Norms

    @property
    def order(self) -> list[int]:
        graph = self.done.graph
        known = () if graph is None else self.parameters.owned_in_order(graph.leaves())
        got = set(self.tensors).intersection(self.done.tensors)
        return [tensor for tensor in (*known, *self.done.tensors) if tensor in got]

    def without_graph(self) -> GradientSnapshot:
        """Return the same without the graph, which keeps alive all that its nodes hold.

        Of gradients that are finite no report needs the order.
        """
        finite = all(_torch.is_host(norms) and norms.isfinite().all() for _, norms in self.norms)
        first = () if finite else self.order
        tensors = tuple(dict.fromkeys((*first, *self.done.tensors)))
        return replace(self, done=replace(self.done, tensors=tensors, graph=None))


def after_pass(context: Context, done: BackwardPass) -> dict[StepCounter, GradientSnapshot]:
    """Record what the rules at `accumulated` ask for; return what was seen, per clock."""
    _log_contributions(context, done)
    snapshots: dict[StepCounter, GradientSnapshot] = {}
    for counter in context.counters.among(done.tensors):
        due_rules = context.due_rules(counter)
        gradients = Gradients(context, due_rules.watched, done.scale)
        if not gradients:
            continue
        normed = gradients.having(due_rules.normed)
        norms = gradients.take_norms(normed)
        snapshots[counter] = GradientSnapshot(done, context.parameters, normed, norms)
        for bound_rule in due_rules.after:
            if isinstance(bound_rule.rule, ObserverRule | CaptureRule):
                observe(context, bound_rule, gradients)
    return snapshots


def observe(context: Context, bound_rule: BoundRule, gradients: Gradients) -> None:
    """Record statistics of the gradients that a rule matched, or keep copies, in true units."""
    rule, step = bound_rule.rule, bound_rule.counter.step
    tensors = gradients.having(bound_rule.tensors)
    if isinstance(rule, CaptureRule):  # it counts by itself
        for tensor, true in zip(tensors, gradients.unscaled(tensors), strict=True):
            context.captures.keep(rule, context.program.names[tensor], step, _dist.whole(true))
    elif tensors:
        columns = bound_rule.columns(tensors)
        for stat, key in bound_rule.keys.items():
            values = gradients.statistics(stat, tensors)
            context.recorder.add(key, step, columns, values, replace=True)
        context.event_log.count_fired(rule.id, step, len(tensors))


def _log_contributions(context: Context, done: BackwardPass) -> None:
    for rule_id, rows in done.logged.items():
        for counter in context.counters.among(sorted(rows)):
            bound_rule = context.by_counter.bound_rule(rule_id, counter)
            tensors = [tensor for tensor in bound_rule.tensors if tensor in rows]
            columns = bound_rule.columns(tensors)
            for stat, key in bound_rule.keys.items():
                values = _stack([rows[tensor][stat] for tensor in tensors])
                context.recorder.add(key, counter.step, columns, values, replace=False)


def _stack(values: Sequence[Tensor]) -> Tensor:
    """Stack 0-dim statistics, on the host where they come from several devices."""
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    return torch.stack(list(values))


class StepRules:
    """Runs the rules at `step` in file order on the gradients that an update is about to consume."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # Gradients that were edited as final ones at the end of a pass, before an optimizer turned up
        # that is about to consume them, unless the script assigns others.
        self._spared: dict[int, weakref.ref[Tensor]] = {}

    def run(self, counter: StepCounter, gradients: Gradients, *, acting: bool) -> set[int]:
        """Act on the gradients of one clock; return those that an edit may have made non-finite."""
        context = self._context
        due_rules = context.due_rules(counter)
        spared = {i: self._spared.pop(i) for i in due_rules.edited.intersection(self._spared)}
        same = {i for i, grad in spared.items() if i in gradients and gradients[i] is grad()}
        edited = due_rules.edited - same if acting else frozenset()
        suspicious: set[int] = set()
        with torch.no_grad(), gradients.in_true_units(edited):
            for bound_rule in due_rules.at_step:
                rule = bound_rule.rule
                if isinstance(rule, ObserverRule | CaptureRule):
                    observe(context, bound_rule, gradients)
                    continue
                tensors = gradients.having(bound_rule.tensors)
                if isinstance(rule, EditRule):
                    tensors = [tensor for tensor in tensors if tensor in edited]
                if not tensors:
                    continue
                if isinstance(rule, FreezeRule):
                    context.event_log.count_changed(rule.id, len(tensors))
                else:
                    self._edit(bound_rule, gradients, tensors)
                context.event_log.count_fired(rule.id, counter.step, len(tensors))
                if rule.may_overflow and context.mode == "act":
                    suspicious.update(tensors)
        return suspicious

    def arrived(self, tensors: Iterable[int]) -> None:
        """Note that gradients have got something that no rule at the step has seen."""
        for tensor in tensors:
            self._spared.pop(tensor, None)

    def spare(self, edited: Mapping[int, weakref.ref[Tensor]]) -> None:
        """Leave gradients alone in the next update that have been edited for it already."""
        self._spared.update(edited)

    def _edit(self, bound_rule: BoundRule, gradients: Gradients, tensors: Sequence[int]) -> None:
        context, rule = self._context, bound_rule.rule
        edit = context.edits[rule.id]
        if not rule.keeps_zero:
            for tensor in tensors:
                check_layout(rule, gradients[tensor], context.program.names[tensor])
        if edit.by_norm is not None:
            self._by_norm(bound_rule, edit.by_norm, gradients, tensors)
        else:
            self._elementwise(rule, edit, gradients, tensors)

    def _elementwise(
        self, rule: Rule, edit: Edit, gradients: Gradients, tensors: Sequence[int]
    ) -> None:
        event_log, grads = self._context.event_log, gradients.of(tensors)
        parts = [_dist.local(grad) for grad in grads] if _dist.any_sharded(grads) else grads
        answers = changed(edit, parts)
        event_log.count_changed(rule.id, sum(answer is True for answer in answers))
        for answer in answers:
            if isinstance(answer, Tensor):
                event_log.count_changed(rule.id, answer)
        # Whether a gradient has changed must be the same on all ranks that share it: one that measured
        # it again would wait for the others. So all write, be it for nothing.
        written = [
            tensor
            for tensor, grad, part, answer in zip(tensors, grads, parts, answers, strict=True)
            if answer is not False or grad is not part
        ]
        _apply(edit, [_dist.local(grad) for grad in gradients.writable(written)])

    def _by_norm(
        self, bound_rule: BoundRule, edit: ByNorm, gradients: Gradients, tensors: Sequence[int]
    ) -> None:
        event_log, rule = self._context.event_log, bound_rule.rule
        if edit.over_rule:
            # What is hidden from the optimizer in this step is not consumed.
            frozen = self._context.due_rules(bound_rule.counter).frozen
            tensors = [tensor for tensor in tensors if tensor not in frozen]
            if not tensors:
                return
        norms = gradients.norms(tensors, edit.order)
        if edit.over_rule:
            norms = torch.linalg.vector_norm(norms, edit.order, keepdim=True)
        spoilt = norms.isfinite().logical_not_().any()
        event_log.emit_if(spoilt, LEFT_ALONE, rule=rule.id, step=bound_rule.counter.step)
        factors = edit.factor(norms)
        if not _torch.is_host(factors):
            event_log.count_changed(rule.id, (factors.expand(len(tensors)) < 1.0).sum())
            _shorten(gradients.writable(tensors), factors)
            return
        factor_of = zip(tensors, factors.expand(len(tensors)).tolist(), strict=True)
        biting = {tensor: factor for tensor, factor in factor_of if factor < 1.0}
        event_log.count_changed(rule.id, len(biting))
        if biting:
            same = len(set(biting.values())) == 1
            parts = [_dist.local(grad) for grad in gradients.writable(biting)]
            torch._foreach_mul_(parts, next(iter(biting.values())) if same else [*biting.values()])


def _shorten(grads: Sequence[Tensor], factors: Tensor) -> None:
    parts = [_dist.local(grad) for grad in grads]
    if len(factors) == 1:
        _numbers.multiply_(parts, factors)
        return
    for part, factor in zip(parts, factors.unsqueeze(1).unbind(), strict=True):
        _numbers.multiply_([part], factor)


def _apply(edit: Edit, grads: list[Tensor]) -> None:
    dense = [grad for grad in grads if grad.layout is torch.strided]
    if dense:
        edit.apply_(dense)
    if len(dense) < len(grads):
        for grad in grads:
            if grad.layout is not torch.strided:
                # In place for the outside: the optimizer and the script keep seeing the same tensor.
                grad.copy_(_numbers.on_values(edit.apply, grad))
