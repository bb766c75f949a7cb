"""The decision of traps on an update: made right before it, with reports on gradients seen since backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from gradsurgeon.actions import NEVER
from gradsurgeon.distributed.ranks import OVERFLOWED
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Bound, Due
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.passes import BackwardPass, PassHistory
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training_events import GOES_ON, StepDecision
from gradsurgeon.runtime.trap_effects import NonfiniteTrap, Trap
from gradsurgeon.runtime.trap_message import born_lines, event_keys
from gradsurgeon.runtime.trap_report import (
    GradientEvidence,
    TrapReport,
    gradient_report,
    uncounted,
)
from gradsurgeon.runtime.trips import Conclusions, Findings, Trip
from gradsurgeon.runtime.update import JudgedUpdate
from gradsurgeon.runtime.votes_heard import ALONE, Heard
from gradsurgeon.tensors import _dist, measure
from gradsurgeon.tensors.measure import Norms

_OVERFLOW = (
    "step {step}: all ranks skip the step, because the scaled gradients of rank {rank} overflowed and those of other ranks did "
    "not: its GradScaler skips alone, so its scale differs from the others from now on"
)
_NO_OVERFLOW = "the GradScaler skips a step that no loss scale can mend"
_EDITED = "right before the update, and finite before the rules at `step`"
SCALER_SKIP = "the GradScaler skipped step {step}: the scaled gradients were not finite"


class Traps:
    def __init__(self, context: Context, kept: KeptCalls, effects: Effects) -> None:
        self._context = context
        self._effects = effects
        self._conclusions = Conclusions(context, kept, effects)
        self.passes = PassHistory()

    @property
    def keeps_calls(self) -> bool:
        """Whether the next trip of some rule is diagnosed."""
        return bool(self._conclusions.diagnosis.pending)

    def objections(self, done: BackwardPass) -> list[Objection]:
        """Return this rank's objections to the update after a pass. Reads the device once, and again for a report."""
        objections = []
        for counter in self._context.counters.among(done.indices):
            objections += self._objections_to(counter, done)
        return objections

    def _objections_to(self, counter: StepCounter, done: BackwardPass) -> list[Objection]:
        names = self._context.names
        concerns = names[counter.indices[0]]
        judges = self._effects.due(counter).judges
        deciding = [bound for bound in judges if bound.effect.votes and bound.effect.decides]
        passes = self.passes.feeding(counter) if deciding else ()
        norms = passes[-1].norms if passes else ()
        (doubtful,) = measure.nonfinite(norms)
        rank = _dist.rank()
        if doubtful and done.scale is not None:
            text = _OVERFLOW.format(step=counter.step, rank=rank)
            return [Objection(rank, "", OVERFLOWED, concerns, "", text)]
        gradients = dict(zip(*self._context.parameters.grads(doubtful), strict=True))
        evidence = GradientEvidence(passes, (), measure.counts(gradients), norms)
        findings: dict[Trap, TrapReport | None] = {}
        for bound in deciding:
            if evidence.concerns(bound.indices):
                assert isinstance(bound.effect, Trap)  # noqa: S101 # only traps judge
                findings[bound.effect] = evidence.report(names)
        for tensor_trap in self._effects.tensor_traps:
            if tensor_trap.decides:
                findings[tensor_trap] = tensor_trap.peek(self._holders(counter))
        objections = []
        for trap, report in findings.items():
            if report is not None:
                trip = Trip(trap, counter.trips.get(trap.rule.id, 0) + 1, report)
                lines = [self._conclusions.head(counter.step, trip), *report.lines, report.hint]
                text = "\n".join(lines).rstrip("\n")
                where = trap.rule.id, trip.severity, concerns, report.name
                objections.append(Objection(rank, *where, text, bool(report.guilty)))
        return objections

    def decide(self, update: JudgedUpdate, due: Due, *, moved: bool) -> StepDecision:
        """Judge the gradients that the optimizer is about to consume. Reads the device once, and again for a report."""
        update.counter.scaler_skips = 0
        findings = self._judge(update, due.judges)
        for trap in self._effects.tensor_traps:
            holders = self._holders(update.counter)
            is_concerned = trap.has_flags(holders)
            report = trap.report(holders)
            if is_concerned:
                findings[trap] = report
        return self._conclude(update, findings, moved=moved)

    def _judge(
        self, update: JudgedUpdate, judges: Sequence[Bound]
    ) -> dict[Trap, TrapReport | None]:
        looked: list[tuple[Bound, Norms]] = []
        # Traps share numbers: each is read once, and all together.
        distinct: dict[int, Norms] = {}
        for bound in judges:
            norms = bound.effect.look(update, bound)
            if norms:
                looked.append((bound, norms))
                distinct[id(norms)] = norms
        if not looked:
            return {}
        doubtful = dict(zip(distinct, measure.nonfinite(*distinct.values()), strict=True))
        findings: dict[Trap, TrapReport | None] = {}
        for bound, norms in looked:
            trap = bound.effect
            assert isinstance(trap, Trap)  # noqa: S101 # only traps judge
            findings[trap] = None
            suspects = doubtful[id(norms)]
            if suspects:
                findings[trap] = trap.judge(update, bound, suspects)
        return findings

    def _holders(self, counter: StepCounter) -> Sequence[StepCounter]:
        # Modules that no optimizer owns use the common counter: the next update of any optimizer judges them.
        return (counter, self._context.counters.common)

    def decide_edited(
        self, update: JudgedUpdate, due: Due, edited: set[int], *, moved: bool
    ) -> StepDecision:
        """Judge gradients again that rules at `step` edited, alike on all ranks. A collective for sharded gradients."""
        context = self._context
        trapped = due.trapped
        norms = measure.norms(*context.parameters.grads(sorted(edited.intersection(trapped))))
        (doubtful,) = measure.nonfinite(norms)
        if not doubtful:
            return self._conclude(update, {}, alike=True, moved=moved)
        suspects = dict(zip(*context.parameters.grads(doubtful), strict=True))
        bad = measure.counts(suspects)
        numbers = measure.as_dict(norms)
        for index, gradient in suspects.items():
            if index not in bad and _dist.is_sharded(gradient):
                bad[index] = uncounted(numbers[index])
        order, _ = context.parameters.grads(trapped)
        findings: dict[Trap, TrapReport | None] = {}
        for bound in due.judges:
            if isinstance(bound.effect, NonfiniteTrap) and not bad.keys().isdisjoint(bound.indices):
                findings[bound.effect] = gradient_report(context.names, _EDITED, order, bad, {})
        return self._conclude(update, findings, alike=not context.ranks.own(bad), moved=moved)

    def follow_others(self, counter: StepCounter, heard: Heard, *, moved: bool) -> StepDecision:
        """Judge nothing, and follow the other ranks. What tensors of modules showed is of an update that nobody judges."""
        for trap in self._effects.tensor_traps:
            trap.forget(self._holders(counter))
        scale = self.passes.scale(counter)
        return self._conclusions.conclude(counter, {}, heard, scale, moved=moved)

    def _conclude(
        self, update: JudgedUpdate, findings: Findings, *, moved: bool, alike: bool = False
    ) -> StepDecision:
        counter = update.counter
        rows = counter.trips or counter.trips_now
        if update.heard is ALONE and not rows and not any(findings.values()):
            return GOES_ON
        scale = self.passes.scale(counter)
        return self._conclusions.conclude(
            counter, findings, update.heard, scale, alike=alike, moved=moved
        )

    def skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Note a step that a scaler skipped; raise if the cause is a persistent NaN rather than an overflow."""
        counter.scaler_skips += 1
        step = counter.step
        self._context.event_log.emit("scaler-skip", SCALER_SKIP.format(step=step), step=step)
        findings = self._judge_skip(counter, is_low=float(scale) < 1.0)
        kept_scale = self.passes.scale(counter)
        decision = self._conclusions.conclude(counter, findings, ALONE, kept_scale)
        if decision.error is not None:
            raise decision.error()

    def _judge_skip(self, counter: StepCounter, *, is_low: bool) -> Findings:
        due = self._effects.due(counter)
        evidence = self._evidence_of_skip(counter, due.trapped)
        # A skip caused by other tensors says nothing about a trap: its row goes on.
        traps = []
        for bound in due.judges:
            trap = bound.effect
            if isinstance(trap, NonfiniteTrap) and evidence.concerns(bound.indices):
                traps.append(trap)
        if not traps or self._context.mode == "observe":
            return {}
        skips = counter.scaler_skips
        stuck = [trap for trap in traps if is_low or skips >= trap.decision.patience]
        # Overflows come in rows until the scale fits: not each is worth running the step again.
        if not stuck and skips == 1:
            self._diagnose_skip(counter, traps[0].rule.id, evidence)
        why = "its scale is below 1" if is_low else f"{skips} steps in a row"
        findings: dict[Trap, TrapReport | None] = {}
        for trap in stuck:
            # This trip exceeds `give_up_after`, and so does each later trip until the trap finds nothing.
            rule = trap.rule.id
            patience = trap.decision.patience
            self._context.event_log.count_fired(rule, counter.step)
            if patience < NEVER:
                counter.trips[rule] = max(counter.trips.get(rule, 0), patience - 1)
            head = f"the GradScaler keeps skipping ({why}): "
            report = evidence.report(self._context.names, head)
            findings[trap] = replace(report, goes_on="the GradScaler skips the update")
        return findings

    def _evidence_of_skip(self, counter: StepCounter, trapped: Sequence[int]) -> GradientEvidence:
        # A scaler checks before the script can repair or clip, so the trap must do the same.
        passes = self.passes.feeding(counter)
        norms: Norms = ()
        if passes:
            norms = passes[-1].norms
        if not norms:
            norms = self._norms_here(trapped)
        by_index = measure.as_dict(norms)
        bad = {}
        for index, norm in by_index.items():
            if not math.isfinite(norm):
                bad[index] = uncounted(norm)
        return GradientEvidence(passes, list(by_index), bad)

    def _norms_here(self, indices: Sequence[int]) -> Norms:
        """Return the norms of what this rank holds of some gradients."""
        having, grads = self._context.parameters.grads(indices)
        return measure.plain_norms(having, _dist.parts(grads))

    def _diagnose_skip(self, counter: StepCounter, rule: str, evidence: GradientEvidence) -> None:
        """Report once the origin of a NaN in a skipped step, if it is no overflow."""
        context = self._context
        step = counter.step
        report = evidence.report(context.names)
        scale = self.passes.scale(counter)
        diagnosis = self._conclusions.diagnosis.diagnose_skip(step, scale, report)
        if diagnosis is not None:
            place = context.place(step, rule)
            text = "\n".join([f"{place}: {_NO_OVERFLOW}", *diagnosis.text()])
            shown = "\n".join([*born_lines(place, diagnosis), _NO_OVERFLOW])
            keys = event_keys(diagnosis, ())
            context.event_log.notice_once(
                "no-overflow", text, rule=rule, step=step, warn=True, facts=keys, shown=shown
            )
