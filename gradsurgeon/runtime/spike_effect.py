"""The effect of `spike-trap`: it judges norms by earlier norms, and learns from each update that takes place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.actions import Spikes
from gradsurgeon.errors import shorten_names
from gradsurgeon.runtime.device_outcome import when_made
from gradsurgeon.runtime.effect import Bound, WeightUpdate, places_among
from gradsurgeon.runtime.gradients import LEFT_ALONE, Gradients
from gradsurgeon.runtime.running_norms import (
    JudgedNorms,
    Learnt,
    LearntByRule,
    RunningStatistic,
    regrouped,
    wide,
)
from gradsurgeon.runtime.spike_report import describe_spike, spike_report
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.trap_effects import Trap
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.runtime.update import Judged, JudgedUpdate
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.measure import Norms

_NEW = "the state does not have this rule: the rule restarts"
_OTHERS = "acts on other parameters or shapes than in the state ({names}): {what}"
_UNLIKE = "has learnt as `{old}`, per: {old_per}, and is `{new}`, per: {new_per}: the rule restarts"


class SpikeEffect(Trap):
    """Objects to norms above a running bound, or shortens the gradients that have them."""

    measures = True
    defers = True
    noun = "gradient"
    compiled: Spikes

    def prepare(self) -> None:
        self.edits = self.rule.edits
        self.per = "rule" if self.compiled.over_rule else "parameter"
        # The names of what has a statistic, by the numbers in `RunningStatistic.indices`; losses get theirs as they come.
        self.names = [*self.context.names]
        if self.rule.judges_losses:
            self.per = "loss"
            self.names = []
        # By parameter. Parameters that share a counter share a statistic.
        self.statistics: dict[int, RunningStatistic] = {}
        # The norms of updates that are about to take place.
        self._judged: dict[StepCounter, JudgedNorms] = {}
        # Those of the last update, if the device decided on it.
        self._late: dict[StepCounter, JudgedNorms] = {}

    def has(self, method: str, counter: StepCounter) -> bool:
        if method == "act":
            return self.edits
        return super().has(method, counter)

    def look(self, update: JudgedUpdate, bound: Bound) -> Norms:
        self._judged.pop(update.counter, None)
        self._late.pop(update.counter, None)
        gradients = update.gradients
        having = gradients.having(bound.indices)
        # The optimizer does not consume a gradient that a `freeze` hides in this step.
        indices = [index for index in having if index not in gradients.hidden]
        if not indices:
            return ()
        with torch.no_grad():
            each = wide(gradients.norms(indices, 2.0))
            if update.outcome is not None and update.outcome.overflow is not None:
                overflow = update.outcome.overflow.to(each.device).bool()
                each = each.masked_fill(overflow, math.nan)
            judged = self._compare(bound.indices, indices, each)
        self._judged[update.counter] = judged
        if self.edits:
            return ()
        return judged.flags

    def _compare(
        self, members: tuple[int, ...], indices: Sequence[int], each: Tensor
    ) -> JudgedNorms:
        """Compare the norms of some of the members of a statistic with the bound."""
        spikes = self.compiled
        norms = each
        if spikes.over_rule:
            norms = torch.linalg.vector_norm(each, keepdim=True)
        statistic = self._statistic(members, each.device)
        columns = None
        kept = statistic.kept
        if len(indices) < len(members):
            columns = _torch.integers(tuple(places_among(members, indices)), each.device)
            if not spikes.over_rule:
                kept = kept[:, columns]
        passed, after = spikes.bound.advance(kept, norms)
        return JudgedNorms(
            spikes, statistic, tuple(indices), columns, each, norms, kept, passed, after
        )

    def _statistic(self, indices: tuple[int, ...], device: torch.device) -> RunningStatistic:
        """Return the learnt statistic of the parameters of a counter, on a device."""
        statistic = self.statistics.get(indices[0])
        if statistic is None or statistic.indices != indices:
            earlier = [self.statistics.get(index) for index in indices]
            # Another optimizer may have owned some of these parameters meanwhile.
            own = [known for known in earlier if known is not None and known.indices == indices]
            if own:
                statistic = own[0]
            else:
                statistic = regrouped(self.compiled, indices, earlier)
                self._keep(statistic)
        if statistic.kept.device != device:
            statistic.kept = statistic.kept.to(device)
            statistic.usual = statistic.usual.to(device)
        return statistic

    def _keep(self, statistic: RunningStatistic) -> None:
        self.statistics.update(dict.fromkeys(statistic.indices, statistic))

    def judge(
        self,
        update: Judged,
        bound: Bound,
        doubtful: Sequence[int],  # noqa: ARG002 # the judged norms say which
    ) -> TrapReport | None:
        judged = self._judged_norms(bound)
        # Passes that reached different parameters have no common order.
        reached = {frozenset(snapshot.done.indices) for snapshot in update.passes}
        order = update.passes[-1].arrived if len(reached) == 1 else []
        return spike_report(self.names, judged, order)

    def _judged_norms(self, bound: Bound) -> JudgedNorms:
        return self._late.get(bound.counter) or self._judged[bound.counter]

    def act(self, gradients: Gradients, bound: Bound) -> None:
        indices = gradients.having(bound.indices)
        if not indices:
            return
        judged = self._judged.get(bound.counter)
        if judged is not None:
            self._cut(gradients, judged, bound.counter.step)
        when_made(gradients.outcome, self.count_fired, bound.counter.step, len(indices))

    def _cut(self, gradients: Gradients, judged: JudgedNorms, step: int) -> None:
        indices = gradients.having(judged.indices)
        places: Sequence[int] = range(len(indices))
        if judged.spikes.over_rule:
            places = [0] * len(indices)
        factors = judged.factors(indices)
        is_counted = gradients.shorten(self.rule.id, indices, places, factors)
        when_made(gradients.outcome, self._tell, judged, indices, step, is_counted)

    def _tell(
        self,
        judged: JudgedNorms,
        indices: Sequence[int],
        step: int,
        is_counted: bool,  # noqa: FBT001 # of a callback
    ) -> None:
        """Report norms above the bound, and count what they cut."""

        def tell(numbers: Tensor) -> None:
            norms, passed, _ = judged.read(numbers)
            if not all(math.isfinite(norm) for norm in norms):
                text = LEFT_ALONE.replace("gradient", self.noun)
                self.emit("notice", text, step=step)
            shortened = [norm for norm, bound in zip(norms, passed, strict=True) if bound < norm]
            if not shortened:
                return
            text, name = describe_spike(
                self.names, judged, numbers, self.noun, acts=self.context.acts
            )
            warns = not self.edits
            self.emit("spike", text, step=step, name=name, warn=warns, quiet=not warns)
            if is_counted:
                return
            number = len(indices) if judged.spikes.over_rule else len(shortened)
            if warns:
                number = 1
            self.count_changed(number)

        self.log.when_read(judged.to_be_read(), tell)

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        judged = self._judged.pop(bound.counter, None)
        if judged is None:
            return
        left_out = None
        if update.outcome is not None:
            self._late[bound.counter] = judged
            left_out = update.outcome.left_out
        learns_all = self.compiled.bound.learns_all
        if update.took_place or learns_all:
            judged.learn(None if learns_all else left_out)

    def state(self) -> dict[str, Any]:
        """Return the learnt state: plain tensors on the host, numbers and texts."""
        parts = []
        for statistic in dict.fromkeys(self.statistics.values()):
            part = {
                "params": [self.names[index] for index in statistic.indices],
                "kept": statistic.kept.cpu(),
                "usual": statistic.usual.cpu(),
            }
            parts.append(part)
        return {
            "bound": self.compiled.bound.name,
            "per": self.per,
            "params": self._judged_names(),
            "statistics": parts,
        }

    def _judged_names(self) -> list[str]:
        if self.rule.judges_losses:
            return [*self.names]
        return self.context.names_of(self.indices)

    def load(
        self,
        learnt: LearntByRule | None,
        index_of: Mapping[str, int],
        reshaped: Collection[str],
    ) -> Iterator[str]:
        """Resume from the result of `state`, except ``reshaped`` parameters; yield each mismatch."""
        self.statistics.clear()
        self._judged.clear()
        self._late.clear()
        if learnt is None:
            yield _NEW
            return
        bound = self.compiled.bound.name
        if (learnt.bound, learnt.per) != (bound, self.per):
            yield _UNLIKE.format(old=learnt.bound, old_per=learnt.per, new=bound, new_per=self.per)
            return
        params = set(self._judged_names())
        others = params.symmetric_difference(learnt.params) | params.intersection(reshaped)
        restarts = self.compiled.over_rule
        if others:
            what = "the rule restarts" if restarts else "they restart"
            yield _OTHERS.format(names=shorten_names(sorted(others)), what=what)
        if others and restarts:
            return
        known = {name: index for name, index in index_of.items() if name not in reshaped}
        # Longest first: a statistic of a part of these parameters, learnt with another optimizer, then replaces its entries.
        for part in sorted(learnt.statistics, key=lambda part: -len(part.params)):
            self._resume(part, known)

    def _resume(self, part: Learnt, index_of: Mapping[str, int]) -> None:
        columns = []
        indices = []
        for column, name in enumerate(part.params):
            if name in index_of:
                columns.append(column)
                indices.append(index_of[name])
        kept = part.kept.clone() if self.compiled.over_rule else part.kept[:, columns]
        self._keep(RunningStatistic(tuple(indices), kept, part.usual[columns]))
