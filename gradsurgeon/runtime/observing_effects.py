"""The effects of rules that keep something of tensors and change nothing: copies and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.actions import CaptureRule, ObserverRule
from gradsurgeon.errors import shorten_names
from gradsurgeon.records.store import Key
from gradsurgeon.runtime.device_outcome import when_judged
from gradsurgeon.runtime.effect import Bound, Effect
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist, _torch, measure

_AWAITING = (
    "has no records of {names}: these gradients await a sum over ranks, which takes a collective, and rules that only look "
    "wait for no rank. A rule at `step` that edits them makes the ranks agree first"
)
_SHARDED = "did not measure a tensor that is sharded over ranks: log another module, or set `use_local_output=True`"


class Copy(Effect):
    """Keeps copies."""

    rule: CaptureRule
    takes_any = True

    @property
    def asks_host(self) -> bool:  # type: ignore[override] # a copy would have to wait
        return self.moment == "step"

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        if not origin.is_again:
            self._keep(origin.name, origin.step, unscaled(tensor, origin.scale))
        return tensor

    def act(self, gradients: Gradients, bound: Bound) -> None:
        indices = gradients.having(bound.indices)
        for index, true in zip(indices, gradients.unscaled(indices), strict=True):
            self._keep(self.context.names[index], bound.counter.step, true)

    def _keep(self, name: str, step: int, tensor: Tensor) -> None:
        # `keep` counts the firing.
        self.context.captures.keep(self.rule, name, step, tensor)


class Record(Effect):
    """Records statistics, in true units."""

    rule: ObserverRule
    records = True

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        if origin.is_again:
            return tensor
        if _dist.is_sharded(tensor):
            step = origin.counter().step
            self.notice_once("sharded", _SHARDED, step=step, warn=True)
            return tensor
        true = unscaled(tensor, origin.scale).detach()
        self.context.recorder.observe(self.rule, origin.name, origin.step, true)
        self.count_fired(origin.step)
        return tensor

    def act(self, gradients: Gradients, bound: Bound) -> None:
        step = bound.counter.step
        indices = gradients.having(bound.indices)
        if gradients.are_sharded:
            indices = self._recordable(gradients, indices, step)
        if not indices:
            return
        self._record(gradients, bound, indices)
        when_judged(gradients.outcome, self.count_fired, step, len(indices))

    def _record(self, gradients: Gradients, bound: Bound, indices: Sequence[int]) -> None:
        step = bound.counter.step
        are_shared = gradients.are_sharded
        columns = bound.columns(indices)
        for stat, keys in bound.keys.items():
            grads: Sequence[Tensor] = ()
            if are_shared:
                grads, values = gradients.parts(stat, indices)
            else:
                values = gradients.statistics(stat, indices)
            for key, numbers in by_column(keys, values, are_parts=are_shared):
                self._add(gradients, key, step, columns, numbers, grads=grads)

    def _add(self, gradients: Gradients, key: Key, *row: Any, **named: Any) -> None:
        add = partial(self.context.recorder.add, key, *row, replace=True, **named)
        when_judged(gradients.outcome, add)

    def _recordable(self, gradients: Gradients, indices: Sequence[int], step: int) -> Sequence[int]:
        """Return the gradients that can be recorded without a collective that other ranks may not call."""
        awaiting = [index for index in indices if _dist.is_partial(gradients[index])]
        if not awaiting or self.context.recorder.shared.together:
            return indices
        text = _AWAITING.format(names=shorten_names(self.context.names_of(awaiting)))
        self.notice_once("awaiting", text, step=step)
        return [index for index in indices if index not in awaiting]


class RecordContributions(Record):
    """Records statistics of what each backward pass adds to gradients."""

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        if origin.logged is not None:
            true = unscaled(tensor, origin.scale)
            origin.logged[self.rule.id][origin.index] = _kept(self.stats, true)
            self.count_fired(origin.step)
        return tensor

    def after_pass(self, done: BackwardPass, bound: Bound) -> None:
        """Record the contributions of a pass."""
        rows = done.seen.logged.get(self.rule.id, {})
        if not rows:
            return
        indices = [index for index in bound.indices if index in rows]
        if not indices:
            return
        columns = bound.columns(indices)
        values = measure.of_kept(list(bound.keys), [rows[index] for index in indices])
        for key, row in zip(chain.from_iterable(bound.keys.values()), values, strict=True):
            self.context.recorder.add(key, bound.counter.step, columns, row, replace=False)


class RecordTogether(Record):
    """Records each statistic of all its gradients together, under the id of the rule."""

    def bound_to(self, counter: StepCounter) -> Bound:
        """Bind the effect. After the key of the single numbers, each statistic has the key of the number of all."""
        bound = super().bound_to(counter)
        if not bound.indices:
            return bound
        rule = self.rule
        # With several optimizers, each has a number of its own.
        name = self.context.curves.name_of(counter, rule.id, bound.indices)
        keys = {}
        for stat, (key,) in bound.keys.items():
            keys[stat] = (key, Key(rule.id, stat, rule.point, (name,)))
        return replace(bound, keys=keys)

    def _record(self, gradients: Gradients, bound: Bound, indices: Sequence[int]) -> None:
        step = bound.counter.step
        for stat, (key, whole) in bound.keys.items():
            if gradients.are_sharded:
                grads, parts = gradients.parts(stat, indices)
                columns = bound.columns(indices)
                self._add(gradients, key, step, columns, parts, grads=grads, joined=whole)
            else:
                values = gradients.statistics(stat, indices)
                self._add(gradients, whole, step, (0,), measure.joined(stat, values))


@_torch.without_grad
def _kept(stats: Sequence[str], grad: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return a copy of a small gradient, to be measured together with others after the pass, else its statistics."""
    if measure.is_kept(stats, grad):
        return grad.detach().clone()
    return measure.numbers(stats, grad)


def by_column(keys: Sequence[Key], values: Tensor, *, are_parts: bool) -> list[tuple[Key, Tensor]]:
    """Return each key of a statistic with its numbers. Numbers that ranks are going to merge keep a second dimension."""
    if len(keys) == 1:
        return [(keys[0], values)]
    columns = torch.split(values, 1, dim=1)
    if not are_parts:
        columns = tuple([column.squeeze(1) for column in columns])
    return list(zip(keys, columns, strict=True))
