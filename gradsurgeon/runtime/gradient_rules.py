"""Runs the rules on all gradients after a pass and before an update, and records weights around updates."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor

from gradsurgeon.records.shared_rows import by_column
from gradsurgeon.runtime.conclusions import StepContext
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule, StepCounter
from gradsurgeon.runtime.effect import Effects
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.training_events import BackwardPass, GradientSnapshot, WeightUpdate
from gradsurgeon.tensors import _dist, _numbers, measure
from gradsurgeon.tensors.sampling import sample
from gradsurgeon.tensors.statistics import STATISTICS


def after_pass(
    context: Context, effects: Effects, done: BackwardPass, known: Gradients | None = None
) -> dict[StepCounter, GradientSnapshot]:
    """Write the records of the rules at `accumulated`; return a snapshot per step counter.

    `known` are the gradients of an update that had no pass, which are those of the pass.
    """
    _log_contributions(context, done)
    snapshots: dict[StepCounter, GradientSnapshot] = {}
    for counter in context.counters.among(done.indices):
        due_rules = context.due_rules(counter)
        gradients = known
        if gradients is None or gradients.asked != due_rules.watched:
            gradients = Gradients(context, due_rules.watched, done.scale)
        # A snapshot without gradients still serves a spike report, which needs the order of the pass.
        if not gradients and not due_rules.reported:
            continue
        normed = gradients.having(due_rules.normed)
        norms = gradients.take_norms(normed)
        reported = bool(due_rules.reported)
        snapshots[counter] = GradientSnapshot(
            done, context.parameters, counter.indices, normed, norms, reported
        )
        for bound in due_rules.after:
            effects[bound.rule.id].act(gradients, bound)
    return snapshots


def _log_contributions(context: Context, done: BackwardPass) -> None:
    for rule_id, rows in done.logged.items():
        for counter in context.counters.among(sorted(rows)):
            bound_rule = context.by_counter.bound_rule(rule_id, counter)
            indices = [index for index in bound_rule.indices if index in rows]
            columns, stats = bound_rule.columns(indices), list(bound_rule.keys)
            values = measure.of_kept(stats, [rows[index] for index in indices])
            keys = chain.from_iterable(bound_rule.keys.values())
            for key, row in zip(keys, values, strict=True):
                context.recorder.add(key, counter.step, columns, row, replace=False)


def run_step_rules(
    context: Context, effects: Effects, update: StepContext, *, acting: bool
) -> set[int]:
    """Run the rules at `step` in file order; return the tensors that an edit may have made non-finite."""
    due, gradients = update.due, update.gradients
    suspicious: set[int] = set()
    if not due.at_step:
        return suspicious
    gradients.hidden = due.frozen
    edited = due.edited if acting else ()
    scale = gradients.scale
    units = nullcontext() if scale is None else gradients.in_true_units(scale, edited)
    with torch.no_grad(), units:
        for bound in due.at_step:
            effect = effects[bound.rule.id]
            if effect.edits and not acting:
                continue
            effect.act(gradients, bound)
            if bound.rule.may_overflow and context.mode == "act":
                suspicious.update(gradients.having(bound.indices))
    return suspicious


# Elements of a tensor of which an update is recorded; a larger one is sampled.
SAMPLE = 16384


class WeightRecords:
    """The records of weights of a session."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # The elements before the update that runs now, by tensor.
        self._before: dict[StepCounter, dict[int, Tensor]] = {}

    def before_update(self, step: WeightUpdate) -> None:
        if not (due := self._due(step)):
            return
        changing = (bound for bound in due if bound.rule.ref.side == "update")
        indices = {index for bound in changing for index in bound.indices}
        self._before[step.counter] = {
            index: _sample(param)
            for index in indices
            if (param := self._context.parameters.param(index)) is not None
        }

    def after_update(self, step: WeightUpdate, *, took_place: bool) -> None:
        before = self._before.pop(step.counter, None)
        if before is None or not took_place:
            return
        for bound in self._due(step):
            kept = before if bound.rule.ref.side == "update" else None
            self._record(bound, kept)

    def _due(self, step: WeightUpdate) -> Sequence[BoundRule]:
        """Return the due rules on weights. Of a script that updates weights by hand no update is known."""
        if step.optimizer() is None:
            return ()
        return self._context.due_rules(step.counter).of_weights

    def _record(self, bound: BoundRule, before: dict[int, Tensor] | None) -> None:
        context, step = self._context, bound.counter.step
        found = zip(bound.indices, context.parameters.params(bound.indices), strict=True)
        there = {
            index: param.detach()
            for index, param in found
            if param is not None and (before is None or index in before)
        }
        if not there:
            return
        indices, params = list(there), list(there.values())
        columns, shared = bound.columns(indices), _dist.any_sharded(params)
        measured = measure.parts if shared else measure.statistics
        grads = params if shared else ()
        with torch.no_grad():
            changes = [] if before is None else [_pair(before[t], there[t]) for t in indices]
            for stat, keys in bound.keys.items():
                if before is None:
                    values = measured(stat, params)
                else:
                    values = _scaled(stat, measured(stat, _changes(stat, changes)), params, changes)
                for key, numbers in by_column(keys, values, are_parts=shared):
                    context.recorder.add(key, step, columns, numbers, replace=False, grads=grads)
        context.event_log.count_fired(bound.rule.id, step, len(indices))


def _sample(param: Tensor) -> Tensor:
    """Return elements of the part of a parameter that this rank holds, of each part the same share."""
    part = _dist.local(param)
    return sample(part, -(-SAMPLE * part.numel() // max(SAMPLE, param.numel(), 1)))


def _pair(old: Tensor, param: Tensor) -> Tensor:
    """Return elements of a parameter before and after an update. Shape ``[2, n]``, float32 at least."""
    return torch.stack([_numbers.in_float32(old), _numbers.in_float32(_sample(param))])


def _changes(stat: str, pairs: Sequence[Tensor]) -> Sequence[Tensor]:
    return pairs if STATISTICS[stat].of_update else [pair[1] - pair[0] for pair in pairs]


def _scaled(stat: str, values: Tensor, params: Sequence[Tensor], pairs: Sequence[Tensor]) -> Tensor:
    """Return numbers of samples, scaled to the parts of parameters that this rank holds."""
    # Sums grow with the number of elements.
    power = 0.5 if stat == "l2" else 1.0 if STATISTICS[stat].merge == "sum" else 0.0
    sizes = [
        _dist.local(param).numel() / max(1, pair.shape[1])
        for param, pair in zip(params, pairs, strict=True)
    ]
    if power == 0.0 or max(sizes) <= 1.0:
        return values
    # Multiplied one by one: factors in a tensor would have to be copied to a device.
    return torch.stack([value * size**power for value, size in zip(values, sizes, strict=True)])
