"""One update that is about to take place, as the effects that judge it see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training_events import GradientSnapshot, WeightUpdate
from gradsurgeon.runtime.trap_report import GradientEvidence
from gradsurgeon.runtime.votes_heard import Heard
from gradsurgeon.tensors import _dist, measure
from gradsurgeon.tensors.measure import Norms


@dataclass(eq=False)
class DueUpdate:
    """An update that is about to take place.

    Attributes:
        event: the update of the optimizer.
        gradients: the gradients that the script hands over.
        trapped: the parameters whose gradients traps search for non-finite elements.
        passes: what the backward passes that feed it have left, the earliest first.
        heard: the votes of the ranks on it.
    """

    event: WeightUpdate
    gradients: Gradients
    trapped: Sequence[int]
    passes: Sequence[GradientSnapshot]
    heard: Heard
    _evidence: GradientEvidence | None = field(default=None, init=False)

    @property
    def counter(self) -> StepCounter:
        return self.event.counter

    @property
    def step(self) -> int:
        return self.event.counter.step

    @cached_property
    def _searched(self) -> Sequence[int]:
        return self.gradients.having(self.trapped)

    @cached_property
    def norms(self) -> Norms:
        """The norms that traps search: after the last backward pass, and now. All traps read the same numbers."""
        now = self.gradients.take_norms(self._searched)
        before = self.passes[-1].norms if self.passes else ()
        return (*before, *now)

    def evidence(self, doubtful: Sequence[int]) -> GradientEvidence:
        """Return what is known of the gradients, given those with a doubtful norm. Waits for the device."""
        if self._evidence is None:
            gradients = self.gradients
            there = [index for index in doubtful if index in gradients]
            bad = measure.counts(dict(zip(there, gradients.of(there), strict=True)))
            divided = [index for index in self._searched if _dist.is_sharded(gradients[index])]
            self._evidence = GradientEvidence(
                self.passes,
                self._searched,
                bad,
                gradients.take_norms(self._searched),
                frozenset(divided),
            )
        return self._evidence
