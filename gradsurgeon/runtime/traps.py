"""The decision of traps on an update: made right before it, with reports on gradients seen since backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from torch import Tensor

from gradsurgeon.distributed.ranks import OVERFLOWED, StopReason
from gradsurgeon.distributed.session_discovery import LIMIT
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.device_outcome import DeviceOutcome, when_judged
from gradsurgeon.runtime.effect import Bound, Due, Findings, WeightUpdate
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.passes import BackwardPass, PassHistory
from gradsurgeon.runtime.scaler_skips import judge_skip
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.step_diagnosis import Tripped
from gradsurgeon.runtime.trap_effects import NonfiniteTrap
from gradsurgeon.runtime.trap_report import (
    gradient_report,
    uncounted,
)
from gradsurgeon.runtime.trips import Conclusions, Trip
from gradsurgeon.runtime.update import Judged, JudgedUpdate
from gradsurgeon.runtime.votes_heard import ALONE, Heard
from gradsurgeon.tensors import _dist, measure
from gradsurgeon.tensors.measure import Norms
from gradsurgeon.tensors.sent_norms import SentNorms, are_on_one_device, as_norms

_OVERFLOW = (
    "step {step}: all ranks skip the step, because the scaled gradients of rank {rank} overflowed and those of other ranks did "
    "not: its GradScaler skips alone, so its scale differs from the others from now on"
)
_EDITED = "right before the update, and finite before the rules at `step`"


# Traps have looked at these numbers: a non-finite number may be an objection.
Looks = Mapping[Bound, Norms]


class Traps:
    def __init__(self, context: Context, kept: KeptCalls, effects: Effects) -> None:
        self._context = context
        self._effects = effects
        self.passes = PassHistory()
        self.conclusions = Conclusions(context, kept, effects, self.passes)

    @property
    def keeps_calls(self) -> bool:
        """Whether the next trip of some rule is diagnosed."""
        return bool(self.conclusions.diagnosis.pending)

    def objections(self, done: BackwardPass) -> list[Objection]:
        """Return this rank's objections to the update after a pass. Reads the device once, and again for a report."""
        objections = []
        for counter in self._context.counters.among(done.indices):
            if not self._effects.due(counter).is_left_to_device:
                objections += self._objections_to(counter, done)
        return objections

    def _objections_to(self, counter: StepCounter, done: BackwardPass) -> list[Objection]:
        judges = self._effects.due(counter).judges
        deciding = [bound for bound in judges if bound.effect.votes and bound.effect.decides]
        passes = self.passes.feeding(counter) if deciding else ()
        norms = passes[-1].norms if passes else ()
        (doubtful,) = measure.nonfinite(norms)
        if doubtful and done.scale is not None:
            rank = _dist.rank()
            text = _OVERFLOW.format(step=counter.step, rank=rank)
            return [Objection(rank, "", OVERFLOWED, self._concerned(counter), "", text)]
        gradients = dict(zip(*self._context.parameters.grads(doubtful), strict=True))
        update = Judged(counter, passes)
        update.norms_now = norms
        update.now = measure.counts(gradients)
        update.is_known = True
        findings: Findings = {}
        for bound in deciding:
            findings[bound.effect] = bound.effect.foresee(update, bound, doubtful)
        for trap in self._effects.tensor_traps:
            if trap.decides:
                findings[trap] = trap.peek(self._holders(counter))
        return self._of_voters(counter, counter.step, findings)

    def _concerned(self, counter: StepCounter) -> str:
        """Return the name of a parameter by which other ranks know an update."""
        return self._context.names[counter.indices[0]]

    def _of_voters(self, counter: StepCounter, step: int, findings: Findings) -> list[Objection]:
        """Return the findings of traps that vote, for other ranks."""
        objections = []
        for trap, report in findings.items():
            if report is None or not trap.votes:
                continue
            rule = trap.rule.id
            trip = Trip(trap, counter.trips.get(rule, 0) + 1, report)
            head = f"{self._context.place(step, rule)}: {report.caused_by(()).head}"
            text = "\n".join([head, *report.lines, report.hint]).rstrip("\n")
            where = rule, trip.severity, self._concerned(counter), report.name
            objections.append(Objection(_dist.rank(), *where, text, bool(report.guilty)))
        return objections

    def look(self, update: JudgedUpdate, judges: Sequence[Bound]) -> Looks:
        """Return the numbers, still on the device, that traps look at in an update."""
        looks = {}
        for bound in judges:
            norms = bound.effect.look(update, bound)
            if norms:
                when_judged(update.outcome, bound.effect.count_fired, update.step)
                looks[bound] = norms
        return looks

    def read(self, looks: Looks, outcome: DeviceOutcome) -> tuple[Looks, bool]:
        """Return what traps look at, on the host, and whether a scaler skips the update. Reads the device once."""
        flag = as_norms([outcome.left_out])
        everything = [flag, *looks.values()]
        if are_on_one_device(everything):
            flag, *norms = SentNorms(everything).read()
            looks = dict(zip(looks, norms, strict=True))
        overflowed = any(measure.as_dict(flag).values())
        outcome.tell(overflowed=overflowed, left_out=overflowed)
        return looks, overflowed

    def decide(self, update: JudgedUpdate, looks: Looks) -> StopReason | None:
        """Judge the gradients that the optimizer is about to consume. Reads the device once, and again for a report."""
        findings = self.judge(update, looks)
        for trap in self._effects.tensor_traps:
            findings |= trap.findings(self._holders(update.counter))
        return self._conclude(update, findings)

    def judge(self, update: Judged, looks: Looks) -> Findings:
        """Return the report of each trap that objects to an update, ``None`` of the others. Reads the device once."""
        if not looks:
            return {}
        # Traps share some norms.
        several = {id(norms): norms for norms in looks.values()}
        doubtful = dict(zip(several, measure.nonfinite(*several.values()), strict=True))
        findings: Findings = {}
        for bound, norms in looks.items():
            findings[bound.effect] = None
            suspects = doubtful[id(norms)]
            if suspects:
                findings[bound.effect] = bound.effect.judge(update, bound, suspects)
        return findings

    def _holders(self, counter: StepCounter) -> Sequence[StepCounter]:
        # Modules that no optimizer owns use the common counter: the next update of any optimizer judges them.
        return (counter, self._context.counters.common)

    def decide_edited(self, update: JudgedUpdate, due: Due, edited: set[int]) -> StopReason | None:
        """Judge gradients again that rules at `step` edited, alike on all ranks. A collective for sharded gradients."""
        context = self._context
        trapped = due.trapped
        norms = measure.norms(*context.parameters.grads(sorted(edited.intersection(trapped))))
        (doubtful,) = measure.nonfinite(norms)
        if not doubtful:
            return self._conclude(update, {}, alike=True)
        suspects = dict(zip(*context.parameters.grads(doubtful), strict=True))
        bad = measure.counts(suspects)
        for index, norm in measure.as_dict(norms).items():
            # Another rank has the bad part of a gradient.
            if index in doubtful and _dist.is_sharded(suspects[index]):
                bad.setdefault(index, uncounted(norm))
        order, _ = context.parameters.grads(trapped)
        findings: Findings = {}
        for bound in due.judges:
            if isinstance(bound.effect, NonfiniteTrap) and not bad.keys().isdisjoint(bound.indices):
                findings[bound.effect] = gradient_report(context.names, _EDITED, order, bad, {})
        return self._conclude(update, findings, alike=not context.ranks.own(bad))

    def follow_others(self, update: WeightUpdate, heard: Heard) -> StopReason | None:
        """Judge nothing, and follow the other ranks. What tensors of modules showed is of an update that nobody judges."""
        counter = update.counter
        for trap in self._effects.tensor_traps:
            trap.forget(self._holders(counter))
        return self.conclusions.conclude(counter, {}, heard, moved=update.has_moved)

    def _conclude(
        self, update: JudgedUpdate, findings: Findings, *, alike: bool = False
    ) -> StopReason | None:
        counter = update.counter
        rows = counter.trips or counter.trips_now
        if update.heard is ALONE and not rows and not any(findings.values()):
            return None
        heard = self._agreed(update, findings, LIMIT)
        moved = update.has_moved
        return self.conclusions.conclude(counter, findings, heard, alike=alike, moved=moved)

    def _agreed(self, update: Judged, findings: Findings, limit: float) -> Heard:
        """Return the votes on an update. Ranks that did not vote meet, if the last pass has left what a trap has found."""
        heard = replace(update.heard, limit=limit)
        if not heard.meeting:
            return update.heard
        objections = self._of_voters(update.counter, update.step, findings)
        if not objections:
            return heard
        # Ranks that have averaged a non-finite gradient in the last pass all have it.
        searched = update.searched
        update.find(searched)
        if update.before.isdisjoint(searched):
            return heard
        by_rank: dict[int, list[Objection]] = heard.exchange(objections, "objections")
        assert heard.voter is not None  # noqa: S101 # it has a meeting
        if limit and len(by_rank) < len(heard.voter.channel.ranks):
            # Some may not know.
            return heard
        of_all = chain.from_iterable(by_rank.values() or [objections])
        return replace(heard, objections=tuple(of_all))

    def conclude_late(
        self, update: Judged, looks: Looks, late: Tripped, limit: float
    ) -> StopReason | None:
        """Judge an update that the device decided on, once its numbers are on the host."""
        counter = update.counter
        counter.scaler_skips = 0
        findings = self.judge(update, looks)
        heard = self._agreed(update, findings, limit)
        return self.conclusions.conclude(counter, findings, heard, late=late)

    def skipped_by_scaler(self, update: WeightUpdate, loss_scale: Tensor) -> None:
        """Note a step that a scaler skipped; raise if the cause is a persistent NaN rather than an overflow."""
        counter = update.counter
        due = update.due
        if due.records:
            self._context.curves.updating(counter, update.optimizer())
        passes = self.passes.feeding(counter)
        judged = Judged(counter, passes)
        if not (passes and passes[-1].norms):
            having, grads = self._context.parameters.grads(due.trapped)
            judged.norms_now = measure.norms(having, _dist.parts(grads))
        for trap in self._effects.tensor_traps:
            trap.forget([counter])
        cause = judge_skip(self.conclusions, judged, due, loss_scale)
        if cause is not None and not cause.skips:
            raise cause.error()
