"""One update that is about to take place, as the effects that judge it see it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from gradsurgeon.runtime.device_outcome import DeviceOutcome
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.passes import GradientSnapshot
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.trap_report import TrapReport, gradient_report, uncounted
from gradsurgeon.runtime.votes_heard import ALONE, Heard
from gradsurgeon.tensors import _dist, measure
from gradsurgeon.tensors.measure import NonfiniteCount, Norms

_AVERAGED = "ranks have averaged these gradients: see the reports of all ranks"
_ELSEWHERE = "if no other rank reports NaN or Inf, the average itself overflowed"


class Judged:
    """An update as a trap judges it, before it takes place, or after the device decided on it.

    Attributes:
        counter: the counter of its optimizer.
        step: its number.
        passes: what the backward passes that feed it have left, the earliest first.
        heard: the votes of the ranks on it.
        searched: the parameters with a gradient that traps search for non-finite elements.
        norms_now: the norms of their gradients.
        magnitudes: the numbers that tell whether an element is non-finite, if the device decides; the script may clear the gradients.
        now: those of them that are non-finite, once they were counted.
        divided: those of which this rank holds a part.
        averaged: whether an engine has averaged the gradients over ranks before they were seen.
        has_moved: whether the optimizer may have moved weights in this step already.
    """

    has_moved = False
    averaged = False
    is_known = False

    def __init__(
        self, counter: StepCounter, passes: Sequence[GradientSnapshot] = (), heard: Heard = ALONE
    ) -> None:
        self.counter = counter
        self.step = counter.step
        self.passes = passes
        self.heard = heard
        self.searched: Sequence[int] = ()
        self.norms_now: Norms = ()
        self.magnitudes: Norms = ()
        self.now: dict[int, NonfiniteCount] = {}
        self.divided: Collection[int] = ()

    def find(self, doubtful: Sequence[int]) -> None:
        """Find once which gradients are non-finite now, given those with a doubtful norm. Waits for the device."""
        if not self.is_known:
            self.is_known = True
            self.now = self._counted(doubtful)

    def _counted(self, doubtful: Sequence[int]) -> dict[int, NonfiniteCount]:
        return _nonfinite(measure.as_dict(self.magnitudes), doubtful)

    def find_skipped(self) -> None:
        """Find what made a `GradScaler` skip the update, which looks before the script can repair or clip."""
        norms = self.norms_now
        if self.passes and self.passes[-1].norms:
            norms = self.passes[-1].norms
        by_index = measure.as_dict(norms)
        self.searched = list(by_index)
        self.norms_now = ()
        self.now = _nonfinite(by_index, by_index)

    @cached_property
    def _after(self) -> dict[int, float]:
        return measure.as_dict(self.passes[-1].norms) if self.passes else {}

    @cached_property
    def before(self) -> frozenset[int]:
        """The gradients that were non-finite after the last pass."""
        norms = measure.as_dict(self.norms_now)
        nonfinite = set()
        for index, norm in self._after.items():
            if math.isfinite(norm):
                continue
            # The norm of finite elements can overflow, and then it still does at the update.
            still_infinite = math.isinf(norm) and not math.isfinite(norms.get(index, math.inf))
            if index in self.now or not still_infinite:
                nonfinite.add(index)
        return frozenset(nonfinite)

    @cached_property
    def repaired(self) -> frozenset[int]:
        return self.before.intersection(self.searched).difference(self.now)

    def concerns(self, indices: Iterable[int]) -> bool:
        """Return whether one of some gradients is non-finite."""
        return not self.now.keys().isdisjoint(indices)

    def _is_guilty(self) -> bool | None:
        """Return whether this rank put NaN or Inf into an average, ``None`` if no average was non-finite."""
        # The first pass that averaged a non-finite gradient decides: later passes add to gradients that are non-finite already.
        # A rank that did not use its part of the model contributed nothing, and got these gradients from other ranks.
        for snapshot in self.passes:
            norms = measure.as_dict(snapshot.norms)
            own_norms = snapshot.done.seen.contributed
            is_guilty: bool | None = None
            for index in self.before.union(self.now) & snapshot.averaged:
                if not math.isfinite(norms.get(index, 0.0)):
                    is_own = index in own_norms and not own_norms[index].isfinite()
                    is_guilty = bool(is_guilty or is_own)
            if is_guilty is not None:
                return is_guilty
        return None

    def report(self, names: Sequence[str], why: str = "") -> TrapReport:
        """Return a report on the border after the first pass that shows one, else at the update."""
        report = self._report_after_pass(names) or self._report_at_update(names)
        bad_now = tuple(names[index] for index in self.now)
        guilty = self._is_guilty()
        hint = _ELSEWHERE if guilty is False else report.hint
        return replace(report, head=why + report.head, bad=bad_now, guilty=guilty, hint=hint)

    def _report_after_pass(self, names: Sequence[str]) -> TrapReport | None:
        """Return a report on the first pass that left a non-finite gradient, ``None`` if no pass did."""
        passes = len(self.passes)
        for number, snapshot in enumerate(self.passes, 1):
            nonfinite = self._nonfinite_of(snapshot)
            if not nonfinite:
                continue
            moment = "after backward"
            if passes > 1:
                moment += f", micro-batch {number} of {passes}"
            # Some tensors keep a gradient from an earlier pass and received none in this pass.
            order = (*snapshot.order, *snapshot.indices)
            norms = self._whole_norms(snapshot.norms)
            report = gradient_report(names, moment, order, nonfinite, norms)
            return replace(report, hint=_AVERAGED) if self.averaged else report
        return None

    def _report_at_update(self, names: Sequence[str]) -> TrapReport:
        moment = "right before the update"
        order = tuple(self.searched)
        was_finite = bool(self.passes)
        if was_finite:
            moment += ", and finite after backward: something in between did it"
            order = (*self.passes[-1].order, *order)
        norms = self._whole_norms(self.norms_now)
        return gradient_report(names, moment, order, self.now, norms, edited=was_finite)

    def _whole_norms(self, norms: Norms) -> dict[int, float]:
        """Return norms without those of parts: the norm of a part is not the norm of the whole."""
        by_index = measure.as_dict(norms)
        return {index: norm for index, norm in by_index.items() if index not in self.divided}

    def _nonfinite_of(self, snapshot: GradientSnapshot) -> dict[int, NonfiniteCount]:
        known: Mapping[int, NonfiniteCount] = {}
        # The counts at the update hold for the pass only if the script has not clipped since. NaN does not equal NaN.
        if repr(self._after) == repr(measure.as_dict(self.norms_now)):
            known = self.now
        nonfinite = {}
        for index, norm in measure.as_dict(snapshot.norms).items():
            if index in self.before and not math.isfinite(norm):
                nonfinite[index] = known.get(index, uncounted(norm))
        return nonfinite


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
        if trapped:
            self.searched, self.norms_now = gradients.take_norms(trapped)
            # Traps read the same numbers: those after the last backward pass, and those now.
            before = passes[-1].norms if passes else ()
            self.norms = (*before, *self.norms_now)
            script_edits = gradients.context.recorder.script_edits
            if script_edits is not None:
                script_edits.compare(before, self.norms_now)

    @property
    def averaged(self) -> bool:  # type: ignore[override] # asked by reports alone
        return self.gradients.context.are_averaged

    def without_gradients(self) -> Judged:
        late = Judged(self.counter, self.passes, self.heard)
        late.searched = self.searched
        late.norms_now = self.norms_now
        grads = self.gradients.grads_of(self.searched)
        late.magnitudes = measure.magnitudes(self.searched, grads)
        return late

    def _counted(self, doubtful: Sequence[int]) -> dict[int, NonfiniteCount]:
        gradients = self.gradients
        present = [index for index in doubtful if index in gradients]
        self.divided = [index for index in self.searched if _dist.is_sharded(gradients[index])]
        return measure.counts(dict(zip(present, gradients.grads_of(present), strict=True)))


def _nonfinite(numbers: Mapping[int, float], indices: Collection[int]) -> dict[int, NonfiniteCount]:
    """Return the kinds of non-finite numbers of some tensors."""
    nonfinite = {}
    for index, number in numbers.items():
        if index in indices and not math.isfinite(number):
            nonfinite[index] = uncounted(number)
    return nonfinite
