"""The effects of records of weights: what they are after an update, what it has changed, and what the optimizer keeps."""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from gradsurgeon.errors import shorten_names
from gradsurgeon.runtime.device_outcome import when_made
from gradsurgeon.runtime.effect import Bound, Effect, WeightUpdate
from gradsurgeon.runtime.observing_effects import by_column
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist, _numbers, measure
from gradsurgeon.tensors.sampling import sample
from gradsurgeon.tensors.statistics import STATISTICS

# Elements of a tensor of which an update is recorded; a larger one is sampled.
SAMPLE = 16384


class AfterUpdate(Effect):
    """Looks at weights, or at their changes, where an update took place."""

    def prepare(self) -> None:
        super().prepare()
        self._of_changes = self.rule.ref.side == "update"
        # Maps each parameter to what is kept of it before the update that runs now; empty if only weights matter.
        self._before: dict[StepCounter, dict[int, Tensor]] = {}

    def before_step(self, update: WeightUpdate, bound: Bound) -> None:
        # If a script updates weights by hand, the session does not see when.
        if update.optimizer() is None:
            return
        before: dict[int, Tensor] = {}
        if self._of_changes:
            params = self.context.parameters.weights_by_index(bound.indices)
            before = {index: self.kept(param) for index, param in params}
        self._before[bound.counter] = before

    def kept(self, param: Tensor) -> Tensor:
        """Return a copy of what this rank holds of a parameter."""
        return _dist.local(param.detach()).clone()

    def updated(
        self, update: WeightUpdate, bound: Bound
    ) -> Sequence[tuple[int, Tensor, Tensor | None]]:
        """Return the parameters of an update that took place, with what was kept of them."""
        before = self._before.pop(bound.counter, None)
        if before is None or not update.took_place:
            return []
        params = []
        for index, param in self.context.parameters.weights_by_index(bound.indices):
            if index in before or not self._of_changes:
                params.append((index, param, before.get(index)))
        return params


class RecordWeights(AfterUpdate):
    """Records statistics of weights, or of what an update has changed."""

    records = True

    def kept(self, param: Tensor) -> Tensor:
        return _sample(param.detach())

    @torch.no_grad()
    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        updated = self.updated(update, bound)
        if not updated:
            return
        recorder = self.context.recorder
        step = bound.counter.step
        columns = bound.columns([index for index, _, _ in updated])
        params = [param.detach() for _, param, _ in updated]
        are_shared = _dist.any_sharded(params)
        measured = measure.parts if are_shared else measure.statistics
        grads = params if are_shared else ()
        # Elements before and after the update. Shape ``[2, n]`` each, float32 at least.
        pairs = []
        for _, param, old in updated:
            if old is not None:
                new = _sample(param.detach())
                pairs.append(torch.stack([_numbers.in_float32(old), _numbers.in_float32(new)]))
        for stat, keys in bound.keys.items():
            if self._of_changes:
                values = _scaled(stat, measured(stat, _changes(stat, pairs)), params, pairs)
            else:
                values = measured(stat, params)
            for key, numbers in by_column(keys, values, are_parts=are_shared):
                add = partial(recorder.add, key, step, columns, numbers, replace=False, grads=grads)
                when_made(update.outcome, add)
        when_made(update.outcome, self.count_fired, step, len(params))


class RecordState(RecordWeights):
    """Records statistics of what an optimizer keeps for each parameter."""

    def updated(
        self, update: WeightUpdate, bound: Bound
    ) -> Sequence[tuple[int, Tensor, Tensor | None]]:
        optimizer = update.optimizer()
        (name,) = self.rule.ref.path
        found = []
        lacking: dict[str, Collection[object]] = {}
        for index, param, _ in super().updated(update, bound):
            assert optimizer is not None  # noqa: S101 # `before_step` has seen it
            state = optimizer.state.get(param, {})
            value = state.get(name)
            if isinstance(value, Tensor | float | int):
                tensor = torch.as_tensor(value).detach()
                if not tensor.is_floating_point():
                    tensor = tensor.float()
                found.append((index, tensor, None))
            elif param.grad is not None:
                lacking[self.context.names[index]] = state
        if lacking and not found:
            kind = type(optimizer).__name__
            others = dict.fromkeys(key for state in lacking.values() for key in state)
            kept = ", ".join([f"`state.{other}`" for other in others]) or "nothing"
            text = f"{kind} keeps no `state.{name}` of {shorten_names([*lacking])}: it keeps {kept}"
            step = bound.counter.step
            self.notice_once(f"state of {kind}", text, step=step, warn=True)
        return found


def _sample(param: Tensor) -> Tensor:
    """Return elements of the part of a parameter that this rank holds, of each part the same share."""
    part = _dist.local(param)
    return sample(part, -(-SAMPLE * part.numel() // max(SAMPLE, param.numel(), 1)))


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
