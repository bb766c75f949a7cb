"""The learnt state of `spike-trap` rules: it judges an update beforehand, and learns from it afterwards."""

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.runtime.conclusions import Finding, Look, StepContext
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule, StepCounter
from gradsurgeon.runtime.gradients import LEFT_ALONE, Gradients
from gradsurgeon.runtime.running_norms import (
    JudgedNorms,
    LearntByRule,
    RunningStatistic,
    regrouped,
    wide,
)
from gradsurgeon.runtime.trap_report import spike_report, told_of_cut
from gradsurgeon.tensors import _torch

# Returns the order in which the gradients of an update came.
_Arrived = Callable[[], Sequence[Sequence[int]]]


class SpikeTraps:
    def __init__(self, context: Context) -> None:
        self._context = context
        # By rule and tensor. The tensors of one rule that share a counter share a statistic.
        self.statistics: dict[tuple[str, int], RunningStatistic] = {}
        # The norms of updates that are about to take place.
        self._judged: dict[StepCounter, dict[str, JudgedNorms]] = {}

    def looks(self, update: StepContext, arrived: _Arrived) -> list[Look]:
        """Compare the norms of an update with earlier updates, without a wait. A collective for sharded gradients."""
        judged = self._judged[update.counter] = {}
        looks = []
        for bound_rule in update.due.spike_traps:
            # The optimizer does not consume a gradient that a `freeze` hides in this step.
            having = update.gradients.having(bound_rule.indices)
            indices = [index for index in having if index not in update.due.frozen]
            if not indices:
                continue
            with torch.no_grad():
                one = self._compare(bound_rule, update, indices)
            judged[bound_rule.rule.id] = one
            if not bound_rule.rule.edits:
                self._context.event_log.count_fired(bound_rule.rule.id, update.step)
                looks.append(Look((one.flags,), partial(self._findings, one, arrived)))
        return looks

    def _findings(
        self, judged: JudgedNorms, arrived: _Arrived, spikes: Sequence[int]
    ) -> list[Finding]:
        names = self._context.program.names
        report = spike_report(names, judged, arrived()) if spikes else None
        return [(judged.bound_rule.rule.id, report)]

    def _compare(
        self, bound_rule: BoundRule, update: StepContext, indices: Sequence[int]
    ) -> JudgedNorms:
        spikes = self._context.spikes[bound_rule.rule.id]
        each = wide(update.gradients.norms(indices, 2.0))
        if update.overflow is not None:
            each = each.masked_fill(update.overflow.to(each.device).bool(), math.nan)
        norms = torch.linalg.vector_norm(each, keepdim=True) if spikes.over_rule else each
        statistic = self._statistic(bound_rule, each.device)
        columns, kept = None, statistic.kept
        if len(indices) < len(bound_rule.indices):
            columns = _torch.integers(tuple(bound_rule.columns(indices)), each.device)
            kept = kept if spikes.over_rule else kept[:, columns]
        passed, after = spikes.bound.advance(kept, norms)
        return JudgedNorms(
            bound_rule, spikes, statistic, tuple(indices), columns, each, norms, kept, passed, after
        )

    def _statistic(self, bound_rule: BoundRule, device: torch.device) -> RunningStatistic:
        """Return the learnt state of a rule for the tensors of a counter, on a device."""
        rule, indices = bound_rule.rule.id, bound_rule.indices
        statistic = self.statistics.get((rule, indices[0]))
        if statistic is None or statistic.indices != indices:
            earlier = [self.statistics.get((rule, index)) for index in indices]
            # Another optimizer may have owned some of these tensors meanwhile.
            own = (one for one in earlier if one is not None and one.indices == indices)
            statistic = next(own, None) or regrouped(self._context.spikes[rule], indices, earlier)
            if statistic not in earlier:
                self._keep(rule, statistic)
        if statistic.kept.device != device:
            statistic.kept = statistic.kept.to(device)
            statistic.usual = statistic.usual.to(device)
        return statistic

    def _keep(self, rule: str, statistic: RunningStatistic) -> None:
        self.statistics.update({(rule, index): statistic for index in statistic.indices})

    def cut(self, bound_rule: BoundRule, gradients: Gradients, indices: Sequence[int]) -> None:
        """Shorten gradients whose norms exceed the bound of a rule."""
        rule, step = bound_rule.rule.id, bound_rule.counter.step
        judged = self._judged.get(bound_rule.counter, {}).get(rule)
        known = set() if judged is None else set(judged.indices)
        indices = [index for index in indices if index in known]
        if judged is None or not indices:
            return
        gradients.shorten(rule, indices, judged.factors(indices))
        on_host = _torch.is_host(judged.norms)

        def tell(numbers: Tensor) -> None:
            log, (norms, passed, _) = self._context.event_log, judged.read(numbers)
            if not all(map(math.isfinite, norms)):
                log.emit("notice", LEFT_ALONE, rule=rule, step=step)
            if cut := sum(map(operator.lt, passed, norms)):
                text, name = told_of_cut(self._context.program.names, judged, numbers)
                log.emit("spike", text, rule=rule, step=step, name=name, quiet=True)
                if not on_host:
                    log.count_changed(rule, len(indices) if judged.spikes.over_rule else cut)

        self._context.event_log.when_read(judged.to_be_read(), tell)

    def state(self) -> dict[str, Any]:
        """Return the learnt state by rule: plain tensors on the host, numbers and texts."""
        names, found = self._context.program.names, {}
        for rule, spikes in self._context.spikes.items():
            of_rule = [one for (of, _), one in self.statistics.items() if of == rule]
            parts = []
            for one in {id(one): one for one in of_rule}.values():
                params = [names[index] for index in one.indices]
                parts.append({"params": params, "kept": one.kept.cpu(), "usual": one.usual.cpu()})
            per = "rule" if spikes.over_rule else "parameter"
            params = self._params(rule)
            learnt = {"bound": spikes.bound.name, "per": per, "params": params}
            found[rule] = {**learnt, "statistics": parts}
        return found

    def load(
        self,
        rules: Mapping[str, LearntByRule],
        index_of: Mapping[str, int],
        reshaped: Collection[str],
    ) -> Iterator[tuple[str, str]]:
        """Resume from the result of `state`, except ``reshaped`` parameters; yield each mismatch with its rule."""
        index_of = {name: index for name, index in index_of.items() if name not in reshaped}
        self.statistics.clear()
        self._judged.clear()
        for rule in sorted(rules.keys() - self._context.spikes.keys()):
            yield (
                "",
                f"the state knows a rule {printable(rule)}, which learns nothing here: ignored",
            )
        for rule, spikes in self._context.spikes.items():
            if (learnt := rules.get(rule)) is None:
                yield rule, "the state does not have this rule: the rule restarts"
                continue
            params, per = set(self._params(rule)), "rule" if spikes.over_rule else "parameter"
            odd = params.symmetric_difference(learnt.params) | params.intersection(reshaped)
            is_same = (learnt.bound, learnt.per) == (spikes.bound.name, per)
            if is_same and odd:
                what = "the rule restarts" if spikes.over_rule else "they restart"
                names = shorten_names(sorted(odd))
                yield (
                    rule,
                    f"acts on other parameters or shapes than in the state ({names}): {what}",
                )
            elif not is_same:
                old = f"has learnt as `{learnt.bound}`, per: {learnt.per}"
                yield rule, f"{old}, and is `{spikes.bound.name}`, per: {per}: the rule restarts"
            if is_same and not (odd and spikes.over_rule):
                self._resume(rule, learnt, index_of)

    def _resume(self, rule: str, learnt: LearntByRule, index_of: Mapping[str, int]) -> None:
        # Longest first: a statistic of a part of these parameters, learnt with another optimizer, then replaces its entries.
        for part in sorted(learnt.statistics, key=lambda part: -len(part.params)):
            columns = [column for column, name in enumerate(part.params) if name in index_of]
            indices = tuple(index_of[part.params[column]] for column in columns)
            kept = part.kept.clone() if learnt.per == "rule" else part.kept[:, columns]
            self._keep(rule, RunningStatistic(indices, kept, part.usual[columns]))

    def _params(self, rule: str) -> list[str]:
        program = self._context.program
        stages = [stage for stage in program.at_step if stage.rule.id == rule]
        return [program.names[index] for stage in stages for index in stage.indices]

    def end(self, counter: StepCounter, *, took_place: bool) -> None:
        """Learn from the update that was judged last if it has taken place, else discard it."""
        judged_by_rule = self._judged.pop(counter, {})
        with torch.no_grad():
            for judged in judged_by_rule.values() if took_place else ():
                judged.learn()
