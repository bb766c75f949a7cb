"""The effect of `spike-trap` on losses: each series of losses has a bound of its own, and ranks vote on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradsurgeon.runtime.activation_rules import matches
from gradsurgeon.runtime.effect import Bound
from gradsurgeon.runtime.running_norms import JudgedNorms, LearntByRule, wide
from gradsurgeon.runtime.spike_effect import SpikeEffect
from gradsurgeon.runtime.spike_report import loss_report
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.runtime.update import Judged, JudgedUpdate
from gradsurgeon.tensors.measure import Norms, nonfinite


class LossSpikes(SpikeEffect):
    """Objects to updates whose losses are above a bound."""

    measures = False
    records = True
    # A loss may be on another device than the gradients.
    defers = False
    # Each rank has its own loss.
    votes = True

    def foresee(
        self,
        update: Judged,  # noqa: ARG002 # of gradients
        bound: Bound,
        doubtful: Sequence[int],  # noqa: ARG002 # the same
    ) -> TrapReport | None:
        judged = self._compare_losses(self.context.curves.so_far(bound.counter))
        if judged is None or not any(nonfinite(judged.flags)):
            return None
        return loss_report(self.names, judged)

    def look(self, update: JudgedUpdate, bound: Bound) -> Norms:
        # The first loss is that of the update if the optimizer evaluates its closure several times.
        losses = self.context.curves.feeding
        if update.outcome is not None:
            # The host has not read the flag of a `GradScaler` yet, so it has not recorded the losses of this update.
            losses = self.context.curves.so_far(bound.counter)
        judged = self._compare_losses(losses)
        if judged is None:
            return ()
        self._judged[bound.counter] = judged
        return judged.flags

    def _compare_losses(self, losses: Mapping[str, Tensor]) -> JudgedNorms | None:
        numbered = {}
        for name, loss in losses.items():
            if name not in self.names:
                if not matches(self.rule, name):
                    continue
                self.names.append(name)
            numbered[self.names.index(name)] = wide(loss)
        if not numbered:
            return None
        indices = sorted(numbered)
        device = numbered[indices[0]].device
        values = torch.stack([numbered[index].to(device) for index in indices])
        return self._compare(tuple(range(len(self.names))), indices, values)

    def judge(
        self,
        update: Judged,  # noqa: ARG002 # the judged losses say all
        bound: Bound,
        doubtful: Sequence[int],  # noqa: ARG002 # the same
    ) -> TrapReport | None:
        return loss_report(self.names, self._judged_norms(bound))

    def load(
        self,
        learnt: LearntByRule | None,
        index_of: Mapping[str, int],  # noqa: ARG002 # of parameters
        reshaped: Collection[str],  # noqa: ARG002 # the same
    ) -> Iterator[str]:
        self.names.clear()
        if learnt is not None and learnt.per == self.per:
            known = dict.fromkeys(learnt.params)
            self.names += [name for name in known if matches(self.rule, name)]
        index_of_series = {name: number for number, name in enumerate(self.names)}
        yield from super().load(learnt, index_of_series, ())
