"""The look after a backward pass: one batched reduction serves every rule that watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import CaptureRule, ObserverRule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule, DueRules
from gradsurgeon.runtime.measure import (
    NonfiniteCount,
    Norms,
    counts,
    nonfinite,
    norms,
    pick,
    statistics,
)
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.training_events import BackwardPass


@dataclass(slots=True)
class GradientSnapshot:
    """What was seen of the gradients of one clock after one backward pass.

    Attributes:
        done: the pass.
        tensors: those of the tensors whose norm somebody reads that had a gradient, ascending.
        norms: their 2-norms, float32; one tensor per device, with the positions it covers.
        counts: exact numbers of non-finite elements, where looking was free (on the host).
    """

    done: BackwardPass
    tensors: tuple[int, ...]
    norms: Norms
    counts: dict[int, NonfiniteCount] | None = None

    def order(self, params: Parameters) -> tuple[int, ...]:
        """Return the tensors in the order in which backward delivered them."""
        graph = self.done.graph
        known = () if graph is None else params.owned_in_order(graph.leaves())
        # A tensor can receive its gradient twice in one pass (reentrant checkpointing).
        ordered = dict.fromkeys((*known, *self.done.tensors))
        got = set(self.tensors).intersection(self.done.tensors)
        return tuple(tensor for tensor in ordered if tensor in got)


def after_pass(context: Context, done: BackwardPass) -> dict[StepCounter, GradientSnapshot]:
    """Record what the rules at `accumulated` ask for; return what was seen, per clock."""
    _log_contributions(context, done)
    snapshots: dict[StepCounter, GradientSnapshot] = {}
    for counter in context.counters.among(done.tensors):
        due_rules = context.due_rules(counter)
        tensors, grads = context.parameters.grads(due_rules.watched)
        if not tensors:
            continue
        by_tensor = dict(zip(tensors, grads, strict=True))
        snapshot = _look(done, due_rules, by_tensor)
        for bound_rule in due_rules.after:
            if isinstance(bound_rule.rule, ObserverRule):
                _log(context, bound_rule, snapshot, by_tensor, done.scale)
            elif isinstance(bound_rule.rule, CaptureRule):
                keep(context, bound_rule, by_tensor, done.scale)
        snapshots[counter] = snapshot
    return snapshots


def _look(done: BackwardPass, due_rules: DueRules, grads: dict[int, Tensor]) -> GradientSnapshot:
    tensors = [tensor for tensor in due_rules.normed if tensor in grads]
    found = norms(tensors, [grads[tensor] for tensor in tensors], scale=done.scale)
    snapshot = GradientSnapshot(done, tuple(tensors), found)
    if due_rules.traps and all(_torch.is_host(values) for _, values in found):
        # On the host a look is free, and an exact one now is worth more than one after the script
        # has clipped. On a device it would be a wait.
        bad = set(nonfinite(found)).intersection(due_rules.trapped)
        snapshot.counts = counts({tensor: grads[tensor] for tensor in sorted(bad)})
    return snapshot


def keep(
    context: Context, bound_rule: BoundRule, grads: dict[int, Tensor], scale: Tensor | None
) -> None:
    """Keep copies of the gradients that a `capture` rule matched, in true units."""
    for tensor in bound_rule.tensors:
        if tensor in grads:
            name = context.program.names[tensor]
            true = _dist.whole(unscaled(grads[tensor], scale))
            context.captures.keep(bound_rule.rule, name, bound_rule.counter.step, true)


def _log(
    context: Context,
    bound_rule: BoundRule,
    snapshot: GradientSnapshot,
    grads: dict[int, Tensor],
    scale: Tensor | None,
) -> None:
    found: Sequence[int] = bound_rule.tensors
    if snapshot.tensors != bound_rule.tensors:
        found = [tensor for tensor in bound_rule.tensors if tensor in grads]
    if not found:
        return
    columns = bound_rule.columns(found)
    for stat, key in bound_rule.keys.items():
        if stat == "l2":
            values = pick(snapshot.norms, found)
        else:
            with torch.no_grad():
                values = statistics(stat, [unscaled(grads[tensor], scale) for tensor in found])
        context.recorder.add(key, bound_rule.counter.step, columns, values, replace=True)
    context.event_log.fired(bound_rule.rule.id, bound_rule.counter.step, len(found))


def _log_contributions(context: Context, done: BackwardPass) -> None:
    """Write the rows of `norm-log` rules at `backward`, one per pass."""
    for rule_id, rows in done.logged.items():
        for counter in context.counters.among(sorted(rows)):
            bound_rule = context.bound_rule(rule_id, counter)
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
