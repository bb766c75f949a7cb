"""One update that is about to take place, as the effects that judge it see it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.passes import GradientSnapshot
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.trap_report import GradientEvidence
from gradsurgeon.runtime.votes_heard import Heard
from gradsurgeon.tensors import _dist, measure
from gradsurgeon.tensors.measure import Norms


class JudgedUpdate:
    """An update that is about to take place.

    Attributes:
        counter: the counter of its optimizer.
        step: its number.
        gradients: the gradients that the script hands over.
        passes: what the backward passes that feed it have left, the earliest first.
        heard: the votes of the ranks on it.
        overflow: whether the optimizer is going to skip the update, if only the device knows.
        norms: the norms of the gradients that traps search for non-finite elements, ``trapped``.
    """

    def __init__(
        self,
        counter: StepCounter,
        gradients: Gradients,
        passes: Sequence[GradientSnapshot],
        heard: Heard,
        *,
        overflow: Tensor | None,
        trapped: Sequence[int],
    ) -> None:
        self.counter = counter
        self.step = counter.step
        self.gradients = gradients
        self.passes = passes
        self.heard = heard
        self.overflow = overflow
        self.norms: Norms = ()
        self._searched: Sequence[int] = ()
        self._norms: Norms = ()
        self._evidence: GradientEvidence | None = None
        if trapped:
            self._searched, self._norms = gradients.take_norms(trapped)
            # Traps read the same numbers: those after the last backward pass, and those now.
            before = passes[-1].norms if passes else ()
            self.norms = (*before, *self._norms)

    def evidence(self, doubtful: Sequence[int]) -> GradientEvidence:
        """Return the evidence on the gradients, given the gradients with a doubtful norm. Waits for the device."""
        if self._evidence is None:
            gradients = self.gradients
            present = [index for index in doubtful if index in gradients]
            bad = measure.counts(dict(zip(present, gradients.grads_of(present), strict=True)))
            divided = [index for index in self._searched if _dist.is_sharded(gradients[index])]
            self._evidence = GradientEvidence(
                self.passes, self._searched, bad, self._norms, frozenset(divided)
            )
        return self._evidence
