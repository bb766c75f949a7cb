"""Records weights once an update is over, and what the update changed in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers
from gradsurgeon.recording.rows import by_column
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule, StepCounter
from gradsurgeon.runtime.optimizers import Update
from gradsurgeon.runtime.training_events import Step
from gradsurgeon.statistics import STATISTICS
from gradsurgeon.tensors import measure
from gradsurgeon.tensors.sampling import sample

# Elements of a tensor of which an update is recorded; a larger one is sampled.
SAMPLE = 16384


class WeightRecords:
    """The records of weights of a session."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # The elements before the update that runs now, by tensor.
        self._before: dict[StepCounter, dict[int, Tensor]] = {}

    def before_update(self, step: Step) -> None:
        if not (due := self._due(step)):
            return
        changing = (bound for bound in due if bound.rule.ref.side == "update")
        tensors = {tensor for bound in changing for tensor in bound.tensors}
        self._before[step.counter] = {
            tensor: _sample(param)
            for tensor in tensors
            if (param := self._context.parameters.param(tensor)) is not None
        }

    def after_update(self, step: Step, *, took_place: bool) -> None:
        before = self._before.pop(step.counter, None)
        if before is None or not took_place:
            return
        for bound in self._due(step):
            kept = before if bound.rule.ref.side == "update" else None
            self._record(bound, kept)

    def _due(self, step: Step) -> Sequence[BoundRule]:
        """Return the due rules on weights. Of a script that updates weights by hand no update is known."""
        if not isinstance(step, Update):
            return ()
        return self._context.due_rules(step.counter).of_weights

    def _record(self, bound: BoundRule, before: dict[int, Tensor] | None) -> None:
        context, step = self._context, bound.counter.step
        found = zip(bound.tensors, context.parameters.params(bound.tensors), strict=True)
        there = {
            tensor: param.detach()
            for tensor, param in found
            if param is not None and (before is None or tensor in before)
        }
        if not there:
            return
        tensors, params = list(there), list(there.values())
        columns, shared = bound.columns(tensors), _dist.any_sharded(params)
        measured = measure.parts if shared else measure.statistics
        grads = params if shared else ()
        with torch.no_grad():
            changes = [] if before is None else [_pair(before[t], there[t]) for t in tensors]
            for stat, keys in bound.keys.items():
                if before is None:
                    values = measured(stat, params)
                else:
                    values = _scaled(stat, measured(stat, _changes(stat, changes)), params, changes)
                for key, numbers in by_column(keys, values, are_parts=shared):
                    context.recorder.add(key, step, columns, numbers, replace=False, grads=grads)
        context.event_log.count_fired(bound.rule.id, step, len(tensors))


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
