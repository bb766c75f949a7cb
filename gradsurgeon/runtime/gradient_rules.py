"""Runs the rules on gradients that a backward pass left: records, copies, and edits at `backward`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import CaptureRule, EditRule, ObserverRule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.gradient_edits import edit_gradients
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.training_events import BackwardPass, Logged
from gradsurgeon.tensors.measure import Norms


@dataclass(frozen=True, slots=True)
class GradientSnapshot:
    done: BackwardPass
    parameters: Parameters
    tensors: Sequence[int]
    norms: Norms
    # Whether a rule reports spikes in the order in which the gradients came.
    reported: bool = False

    @property
    def order(self) -> list[int]:
        graph = self.done.graph
        known = () if graph is None else self.parameters.owned_in_order(graph.leaves())
        got = set(self.tensors).intersection(self.done.tensors)
        return [tensor for tensor in (*known, *self.done.tensors) if tensor in got]

    @property
    def arrived(self) -> list[list[int]]:
        """Return all tensors that the pass reached, in the order in which their gradients came, if that is known.

        Tensors of one node share a list; -1 marks a leaf that is no parameter of the model.
        """
        if self.done.graph is None:
            return []
        by_id = {identity: tensor for tensor, identity in enumerate(self.parameters.ids())}
        return [[by_id.get(id(leaf), -1) for leaf in group] for group in self.done.graph.groups()]

    def without_graph(self) -> GradientSnapshot:
        """Return a copy without the graph, because the graph keeps all tensors of its nodes alive.

        The copy keeps the order of the gradients, unless all norms are known to be finite: then no report needs it.
        """
        finite = all(_torch.is_host(norms) and norms.isfinite().all() for _, norms in self.norms)
        first = () if finite else self.order
        tensors = tuple(dict.fromkeys((*first, *self.done.tensors)))
        return replace(self, done=replace(self.done, tensors=tensors, graph=None))


def after_pass(context: Context, done: BackwardPass) -> dict[StepCounter, GradientSnapshot]:
    """Write the records of the rules at `accumulated`; return a snapshot per step counter."""
    _log_contributions(context, done)
    snapshots: dict[StepCounter, GradientSnapshot] = {}
    for counter in context.counters.among(done.tensors):
        due_rules = context.due_rules(counter)
        gradients = Gradients(context, due_rules.watched, done.scale)
        # A snapshot without gradients still serves a spike report, which needs the order of the pass.
        if not gradients and not due_rules.reported:
            continue
        normed = gradients.having(due_rules.normed)
        norms = gradients.take_norms(normed)
        reported = bool(due_rules.reported)
        snapshots[counter] = GradientSnapshot(done, context.parameters, normed, norms, reported)
        for bound_rule in due_rules.after:
            if isinstance(bound_rule.rule, ObserverRule | CaptureRule):
                observe(context, bound_rule, gradients)
    return snapshots


def observe(context: Context, bound_rule: BoundRule, gradients: Gradients) -> None:
    """Record statistics, or keep copies, of the gradients that a rule matched, in true units."""
    rule, step = bound_rule.rule, bound_rule.counter.step
    tensors = gradients.having(bound_rule.tensors)
    if isinstance(rule, CaptureRule):
        _keep(context, bound_rule, gradients, tensors)
    elif tensors:
        columns = bound_rule.columns(tensors)
        shared = _dist.any_sharded(gradients.of(tensors))
        for stat, key in bound_rule.keys.items():
            if shared:
                grads, parts = gradients.parts(stat, tensors)
                context.recorder.add_parts(key, step, columns, grads, parts)
            else:
                values = gradients.statistics(stat, tensors)
                context.recorder.add(key, step, columns, values, replace=True)
        context.event_log.count_fired(rule.id, step, len(tensors))


def _keep(
    context: Context, bound_rule: BoundRule, gradients: Gradients, tensors: Sequence[int]
) -> None:
    rule, step = bound_rule.rule, bound_rule.counter.step
    for tensor, true in zip(tensors, gradients.unscaled(tensors), strict=True):
        # `keep` counts the firing.
        context.captures.keep(rule, context.program.names[tensor], step, true)


def act_on_contributions(context: Context, tensors: Sequence[int], logged: Logged) -> None:
    """Run the rules at `backward` on gradients that hold only the contribution of the running pass.

    Args:
        context: the context of the session.
        tensors: the tensors in the order in which their gradients came.
        logged: receives the measurements, next to the measurements of hooks.
    """
    for counter in context.counters.among(tensors):
        fed = [tensor for tensor in tensors if context.counters[tensor] is counter]
        gradients = Gradients(context, sorted(fed), None)
        for bound_rule in context.due_rules(counter).in_backward:
            rule, contributed = bound_rule.rule, gradients.having(bound_rule.tensors)
            if not contributed:
                continue
            if isinstance(rule, CaptureRule):
                # The copies must be in the order of arrival: when memory runs out, the oldest copies go first.
                matched = set(contributed)
                in_order = [tensor for tensor in fed if tensor in matched]
                _keep(context, bound_rule, gradients, in_order)
                continue
            if isinstance(rule, EditRule):
                with torch.no_grad():
                    edit_gradients(context, bound_rule, gradients, contributed)
            for stat in bound_rule.keys:
                values = gradients.statistics(stat, contributed).unbind()
                for tensor, value in zip(contributed, values, strict=True):
                    logged[rule.id].setdefault(tensor, {})[stat] = value
            context.event_log.count_fired(rule.id, counter.step, len(contributed))


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
    """Stack 0-dim statistics, on the host if they come from several devices."""
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    return torch.stack(list(values))
