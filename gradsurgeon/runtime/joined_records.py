"""The effect of records of all gradients of a rule together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsurgeon.records.store import Key
from gradsurgeon.runtime.effect import Bound
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.observing_effects import Record
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import measure


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
