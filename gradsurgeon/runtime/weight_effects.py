"""The effect of records of weights: what parameters are after an update, and what the update has changed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon.actions import Observer, Rule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Bound, Effect, WeightUpdate
from gradsurgeon.runtime.observing_effects import by_column
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist, _numbers, measure
from gradsurgeon.tensors.sampling import sample
from gradsurgeon.tensors.statistics import STATISTICS

# Elements of a tensor of which an update is recorded; a larger one is sampled.
SAMPLE = 16384


class RecordWeights(Effect):
    """Records statistics of weights, or of what an update has changed."""

    records = True

    def __init__(
        self, rule: Rule, context: Context, indices: tuple[int, ...], compiled: Observer
    ) -> None:
        super().__init__(rule, context, indices, compiled)
        self.stats = compiled.statistics
        self._of_changes = rule.ref.side == "update"
        # Elements before the update that runs now, by parameter; none where only weights are recorded.
        self._before: dict[StepCounter, dict[int, Tensor]] = {}

    def before_step(self, update: WeightUpdate, bound: Bound) -> None:
        # If a script updates weights by hand, the session does not see when.
        if update.optimizer() is None:
            return
        samples: dict[int, Tensor] = {}
        if self._of_changes:
            params = self.context.parameters.present_by_index(bound.indices)
            samples = {index: _sample(param) for index, param in params}
        self._before[bound.counter] = samples

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        before = self._before.pop(bound.counter, None)
        if before is None or not update.took_place:
            return
        params = {}
        for index, param in self.context.parameters.present_by_index(bound.indices):
            if index in before or not self._of_changes:
                params[index] = param.detach()
        if not params:
            return
        with torch.no_grad():
            self._record(bound, params, before)
        self.log.count_fired(self.rule.id, bound.counter.step, len(params))

    def _record(
        self, bound: Bound, params_by_index: dict[int, Tensor], before: dict[int, Tensor]
    ) -> None:
        recorder = self.context.recorder
        columns = bound.columns(list(params_by_index))
        params = list(params_by_index.values())
        are_shared = _dist.any_sharded(params)
        measured = measure.parts if are_shared else measure.statistics
        grads = params if are_shared else ()
        pairs = []
        if self._of_changes:
            pairs = [_pair(before[index], param) for index, param in params_by_index.items()]
        for stat, keys in bound.keys.items():
            if self._of_changes:
                values = _scaled(stat, measured(stat, _changes(stat, pairs)), params, pairs)
            else:
                values = measured(stat, params)
            for key, numbers in by_column(keys, values, are_parts=are_shared):
                recorder.add(key, bound.counter.step, columns, numbers, replace=False, grads=grads)


def _sample(param: Tensor) -> Tensor:
    """Return elements of the part of a parameter that this rank holds, of each part the same share."""
    part = _dist.local(param)
    return sample(part, -(-SAMPLE * part.numel() // max(SAMPLE, param.numel(), 1)))


def _pair(old: Tensor, param: Tensor) -> Tensor:
    """Return elements of a parameter before and after an update. Shape ``[2, n]``, float32 at least."""
    return torch.stack([_numbers.in_float32(old), _numbers.in_float32(_sample(param))])


def _changes(stat: str, pairs: Sequence[Tensor]) -> Sequence[Tensor]:
    if STATISTICS[stat].of_update:
        return pairs
    return [pair[1] - pair[0] for pair in pairs]


def _scaled(stat: str, values: Tensor, params: Sequence[Tensor], pairs: Sequence[Tensor]) -> Tensor:
    """Return numbers of samples, scaled to the parts of parameters that this rank holds."""
    # Sums grow with the number of elements.
    if stat == "l2":
        power = 0.5
    elif STATISTICS[stat].merge == "sum":
        power = 1.0
    else:
        return values
    sizes = []
    for param, pair in zip(params, pairs, strict=True):
        sampled = max(1, pair.shape[1])
        sizes.append(_dist.local(param).numel() / sampled)
    if max(sizes) <= 1.0:
        return values
    # Multiplied one by one: factors in a tensor would have to be copied to a device.
    return torch.stack([value * size**power for value, size in zip(values, sizes, strict=True)])
