"""The effect of `spike-trap`: it judges norms by earlier norms, and learns from each update that takes place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.actions import Rule, Spikes
from gradsurgeon.errors import shorten_names
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Bound, WeightUpdate
from gradsurgeon.runtime.gradients import LEFT_ALONE, Gradients
from gradsurgeon.runtime.running_norms import (
    JudgedNorms,
    Learnt,
    LearntByRule,
    RunningStatistic,
    regrouped,
    wide,
)
from gradsurgeon.runtime.spike_report import describe_cut, spike_report
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.trap_effects import Trap
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.runtime.update import JudgedUpdate
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.measure import Norms

_NEW = "the state does not have this rule: the rule restarts"
_OTHERS = "acts on other parameters or shapes than in the state ({names}): {what}"
_UNLIKE = "has learnt as `{old}`, per: {old_per}, and is `{new}`, per: {new_per}: the rule restarts"


class SpikeEffect(Trap):
    """Objects to norms above a running bound, or shortens the gradients that have them."""

    measures = True
    decision: Spikes

    def __init__(
        self, rule: Rule, context: Context, indices: tuple[int, ...], spikes: Spikes
    ) -> None:
        super().__init__(rule, context, indices, spikes)
        self.edits = rule.edits
        self.per = "rule" if spikes.over_rule else "parameter"
        # By parameter. Parameters that share a counter share a statistic.
        self.statistics: dict[int, RunningStatistic] = {}
        # The norms of updates that are about to take place.
        self._judged: dict[StepCounter, JudgedNorms] = {}

    def look(self, update: JudgedUpdate, bound: Bound) -> Norms:
        self._judged.pop(update.counter, None)
        gradients = update.gradients
        having = gradients.having(bound.indices)
        # The optimizer does not consume a gradient that a `freeze` hides in this step.
        indices = [index for index in having if index not in gradients.hidden]
        if not indices:
            return ()
        with torch.no_grad():
            judged = self._compare(update, bound, indices)
        self._judged[update.counter] = judged
        if self.edits:
            return ()
        self.log.count_fired(self.rule.id, update.step)
        return judged.flags

    def _compare(self, update: JudgedUpdate, bound: Bound, indices: Sequence[int]) -> JudgedNorms:
        spikes = self.decision
        each = wide(update.gradients.norms(indices, 2.0))
        overflow = update.overflow
        if overflow is not None:
            each = each.masked_fill(overflow.to(each.device).bool(), math.nan)
        norms = each
        if spikes.over_rule:
            norms = torch.linalg.vector_norm(each, keepdim=True)
        statistic = self._statistic(bound.indices, each.device)
        columns = None
        kept = statistic.kept
        if len(indices) < len(bound.indices):
            columns = _torch.integers(tuple(bound.columns(indices)), each.device)
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
                statistic = regrouped(self.decision, indices, earlier)
                self._keep(statistic)
        if statistic.kept.device != device:
            statistic.kept = statistic.kept.to(device)
            statistic.usual = statistic.usual.to(device)
        return statistic

    def _keep(self, statistic: RunningStatistic) -> None:
        self.statistics.update(dict.fromkeys(statistic.indices, statistic))

    def judge(
        self,
        update: JudgedUpdate,
        bound: Bound,
        doubtful: Sequence[int],  # noqa: ARG002 # the judged norms say which
    ) -> TrapReport | None:
        judged = self._judged[bound.counter]
        # Passes that reached different parameters have no common order.
        reached = {frozenset(snapshot.done.indices) for snapshot in update.passes}
        order = update.passes[-1].arrived if len(reached) == 1 else []
        return spike_report(self.context.names, judged, order)

    def act(self, gradients: Gradients, bound: Bound) -> None:
        if not self.edits:
            return
        indices = gradients.having(bound.indices)
        if not indices:
            return
        judged = self._judged.get(bound.counter)
        if judged is not None:
            self._cut(gradients, judged, bound.counter.step)
        self.log.count_fired(self.rule.id, bound.counter.step, len(indices))

    def _cut(self, gradients: Gradients, judged: JudgedNorms, step: int) -> None:
        rule = self.rule.id
        indices = gradients.having(judged.indices)
        is_counted = gradients.shorten(rule, indices, judged.factors(indices))

        def tell(numbers: Tensor) -> None:
            norms, passed, _ = judged.read(numbers)
            if not all(math.isfinite(norm) for norm in norms):
                self.log.emit("notice", LEFT_ALONE, rule=rule, step=step)
            shortened = [norm for norm, bound in zip(norms, passed, strict=True) if bound < norm]
            if not shortened:
                return
            text, name = describe_cut(self.context.names, judged, numbers)
            self.log.emit("spike", text, rule=rule, step=step, name=name, quiet=True)
            if is_counted:
                return
            number = len(indices) if judged.spikes.over_rule else len(shortened)
            self.log.count_changed(rule, number)

        self.log.when_read(judged.to_be_read(), tell)

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        judged = self._judged.pop(bound.counter, None)
        if judged is None:
            return
        if update.took_place or self.decision.bound.learns_all:
            with torch.no_grad():
                judged.learn()

    def state(self) -> dict[str, Any]:
        """Return the learnt state: plain tensors on the host, numbers and texts."""
        names_of = self.context.names_of
        parts = []
        for statistic in dict.fromkeys(self.statistics.values()):
            part = {
                "params": names_of(statistic.indices),
                "kept": statistic.kept.cpu(),
                "usual": statistic.usual.cpu(),
            }
            parts.append(part)
        return {
            "bound": self.decision.bound.name,
            "per": self.per,
            "params": names_of(self.indices),
            "statistics": parts,
        }

    def load(
        self,
        learnt: LearntByRule | None,
        index_of: Mapping[str, int],
        reshaped: Collection[str],
    ) -> Iterator[str]:
        """Resume from the result of `state`, except ``reshaped`` parameters; yield each mismatch."""
        self.statistics.clear()
        self._judged.clear()
        if learnt is None:
            yield _NEW
            return
        bound = self.decision.bound.name
        if (learnt.bound, learnt.per) != (bound, self.per):
            yield _UNLIKE.format(old=learnt.bound, old_per=learnt.per, new=bound, new_per=self.per)
            return
        params = set(self.context.names_of(self.indices))
        others = params.symmetric_difference(learnt.params) | params.intersection(reshaped)
        restarts = self.decision.over_rule
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
        kept = part.kept.clone() if self.decision.over_rule else part.kept[:, columns]
        self._keep(RunningStatistic(tuple(indices), kept, part.usual[columns]))
