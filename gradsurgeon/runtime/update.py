"""One update that is about to take place, as the effects that judge it see it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from gradsurgeon.runtime.device_outcome import DeviceOutcome
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.passes import GradientSnapshot
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.trap_report import GradientEvidence, uncounted
from gradsurgeon.runtime.votes_heard import ALONE, Heard
from gradsurgeon.tensors import _dist, measure
from gradsurgeon.tensors.measure import NonfiniteCount, Norms


class Judged:
    """An update as a trap judges it, before it takes place, or after the device decided on it.

    Attributes:
        counter: the counter of its optimizer.
        step: its number.
        passes: what the backward passes that feed it have left, the earliest first.
        heard: the votes of the ranks on it.
        searched: the parameters with a gradient that traps search for non-finite elements.
        norms_now: the norms of their gradients.
        largest: the largest magnitude of each, once only the device may decide; the script may have cleared the gradients.
        has_moved: whether the optimizer may have moved weights in this step already.
    """

    has_moved = False

    def __init__(
        self, counter: StepCounter, passes: Sequence[GradientSnapshot] = (), heard: Heard = ALONE
    ) -> None:
        self.counter = counter
        self.step = counter.step
        self.passes = passes
        self.heard = heard
        self.searched: Sequence[int] = ()
        self.norms_now: Norms = ()
        self.largest: Norms = ()

    def evidence(self, doubtful: Sequence[int]) -> GradientEvidence:
        """Return the evidence on the gradients, given the gradients with a doubtful norm. Waits for the device."""
        bad = _nonfinite(measure.as_dict(self.largest), doubtful)
        return GradientEvidence(self.passes, self.searched, bad, self.norms_now)

    def evidence_of_skip(self) -> GradientEvidence:
        """Return the evidence on an update that a `GradScaler` skipped, which looks before the script can repair or clip."""
        norms = self.norms_now
        if self.passes and self.passes[-1].norms:
            norms = self.passes[-1].norms
        by_index = measure.as_dict(norms)
        return GradientEvidence(self.passes, list(by_index), _nonfinite(by_index, by_index))


class JudgedUpdate(Judged):
    """An update that is about to take place.

    Attributes:
        gradients: the gradients that the script hands over.
        outcome: what the host learns later, if only the device knows whether the update takes place.
        norms: the norms of these gradients, and those after the last backward pass.

    A recorded run also notes in ``script_edits`` whether the script changed gradients since the last pass.
    """

    def __init__(
        self,
        counter: StepCounter,
        gradients: Gradients,
        passes: Sequence[GradientSnapshot],
        heard: Heard,
        *,
        outcome: DeviceOutcome | None,
        has_moved: bool,
        trapped: Sequence[int],
    ) -> None:
        super().__init__(counter, passes, heard)
        self.gradients = gradients
        self.outcome = outcome
        self.has_moved = has_moved
        self.norms: Norms = ()
        self._evidence: GradientEvidence | None = None
        if trapped:
            self.searched, self.norms_now = gradients.take_norms(trapped)
            # Traps read the same numbers: those after the last backward pass, and those now.
            before = passes[-1].norms if passes else ()
            self.norms = (*before, *self.norms_now)
            script_edits = gradients.context.recorder.script_edits_of_run
            if script_edits is not None:
                script_edits.compare(before, self.norms_now)

    def without_gradients(self) -> Judged:
        late = Judged(self.counter, self.passes, self.heard)
        late.searched = self.searched
        late.norms_now = self.norms_now
        # It is non-finite exactly if an element is.
        grads = self.gradients.grads_of(self.searched)
        late.largest = measure.norms(self.searched, grads, math.inf)
        return late

    def evidence(self, doubtful: Sequence[int]) -> GradientEvidence:
        if self._evidence is None:
            gradients = self.gradients
            present = [index for index in doubtful if index in gradients]
            bad = measure.counts(dict(zip(present, gradients.grads_of(present), strict=True)))
            divided = [index for index in self.searched if _dist.is_sharded(gradients[index])]
            self._evidence = GradientEvidence(
                self.passes,
                self.searched,
                bad,
                self.norms_now,
                frozenset(divided),
                gradients.context.are_averaged,
            )
        return self._evidence


def _nonfinite(numbers: Mapping[int, float], indices: Collection[int]) -> dict[int, NonfiniteCount]:
    """Return the kinds of non-finite numbers of some tensors."""
    nonfinite = {}
    for index, number in numbers.items():
        if index in indices and not math.isfinite(number):
            nonfinite[index] = uncounted(number)
    return nonfinite
