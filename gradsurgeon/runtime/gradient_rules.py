"""Runs the rules on gradients: records, copies and edits, after a backward pass and before an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import CaptureRule, EditRule, FreezeRule, ObserverRule, TrapRule
from gradsurgeon.runtime.conclusions import StepContext
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule, StepCounter
from gradsurgeon.runtime.gradients import Gradients, edit_gradients
from gradsurgeon.runtime.spike_traps import SpikeTraps
from gradsurgeon.runtime.training_events import BackwardPass, GradientSnapshot, Logged


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
                context.recorder.add(key, step, columns, parts, replace=True, grads=grads)
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


def run_step_rules(
    context: Context, spikes: SpikeTraps, update: StepContext, *, acting: bool
) -> set[int]:
    """Run the rules at `step` in file order; return the tensors that an edit may have made non-finite."""
    due, gradients, log = update.due, update.gradients, context.event_log
    suspicious: set[int] = set()
    if not due.at_step:
        return suspicious
    edited = due.edited if acting else ()
    with torch.no_grad(), gradients.in_true_units(edited):
        for bound_rule in due.at_step:
            rule = bound_rule.rule
            if isinstance(rule, ObserverRule | CaptureRule):
                observe(context, bound_rule, gradients)
                continue
            # A trap that does not edit has judged already.
            skipped = not acting if bound_rule.edits else isinstance(rule, TrapRule)
            tensors = [] if skipped else gradients.having(bound_rule.tensors)
            if not tensors:
                continue
            if isinstance(rule, FreezeRule):
                log.count_changed(rule.id, len(tensors))
            elif isinstance(rule, TrapRule):
                spikes.cut(bound_rule, gradients, tensors)
            else:
                edit_gradients(context, bound_rule, gradients, tensors, due.frozen)
            log.count_fired(rule.id, update.step, len(tensors))
            if bound_rule.may_overflow and context.mode == "act":
                suspicious.update(tensors)
    return suspicious
