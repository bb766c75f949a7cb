"""The outcome of an update after traps judged it: trips and rows of trips, reports, and the decision of all ranks."""

from dataclasses import dataclass, replace
from typing import Any

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.events import EventKind
from gradsurgeon.distributed.ranks import FINE, RAISE, SKIP, StopReason
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.errors import NonFiniteGradientError
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Effect, Findings
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.passes import PassHistory
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.step_diagnosis import StepDiagnosis, Tripped
from gradsurgeon.runtime.trap_message import (
    diagnosis_lines,
    event_keys,
    texts,
)
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.runtime.votes_heard import ALONE, Heard
from gradsurgeon.tensors import _dist

NOT_VOTED = (
    "stopped on this rank before the update: the ranks did not vote on this, because it came after their votes (right after "
    "backward) or the votes were lost, so the others may go on, and a rank that skips alone ends up with other weights"
)
_MOVED = (
    "stopped within the step: the optimizer evaluates its closure late, or several times, and may have moved weights in this "
    "step already"
)
_HIDDEN = "its optimizer got no gradient"
_LEFT_OUT = "the device left weights and moments alone, and the host read it before step {told_at}"
_SINCE = (
    " before step {told_at}: the device decided, and this optimizer has made no update since step {step} began; what the "
    "script itself has written since then is unknown"
)
_PARTED = "; other ranks may have made that update, so ranks may have parted in step {step}"
_OBSERVES = "observing only: `then: {then}` would have acted"
_HELD_BACK = "another rule holds this update back"
_SEVERITIES = {"raise": RAISE, "skip-step": SKIP, "warn": FINE}


@dataclass(frozen=True, slots=True)
class Trip:
    """A tripped trap: its report, and the number of trips in a row."""

    trap: Effect
    in_a_row: int
    report: TrapReport
    # Whether the other ranks may not know of it.
    unheard: bool = False
    # Whether the optimizer may have moved weights in this step already.
    moved: bool = False
    # The update, if the device decided on it.
    late: Tripped | None = None

    @property
    def rule(self) -> str:
        return self.trap.rule.id

    @property
    def then(self) -> str:
        if self._gives_up or self._is_forced:
            return "raise"
        return self.trap.then

    @property
    def _gives_up(self) -> bool:
        return bool(self.in_a_row >= self.trap.compiled.patience)

    @property
    def _is_forced(self) -> bool:
        """Whether this rank cannot skip the step, although its rule would."""
        return self.trap.then == "skip-step" and (self.unheard or self.moved)

    @property
    def severity(self) -> int:
        return _SEVERITIES[self.then]

    def outcome(self) -> str:
        """Return the outcome of the step, as a line of the report, if no other rule is more severe."""
        if self.then == "skip-step":
            return f"step skipped: {self.how_skipped}"
        if self.then == "warn":
            return self.report.goes_on
        if self._is_forced and not self.moved and self.late is None:
            return NOT_VOTED
        text = "stopped"
        if self._gives_up and self.trap.then != "raise":
            limit = f"(give_up_after: {self.trap.compiled.give_up_after})"
            text = f"giving up: tripped {self.in_a_row} times in a row {limit}"
        elif self.late is None:
            text = _MOVED if self.moved else "stopped before the update: no weight was moved"
        return text + self._of_device

    @property
    def how_skipped(self) -> str:
        if self.late is None:
            return _HIDDEN
        return _LEFT_OUT.format(told_at=self.late.told_at)

    @property
    def _of_device(self) -> str:
        """What the decision of a device means for the weights, as the end of a sentence; nothing if the host decided."""
        if self.late is None:
            return ""
        text = _SINCE.format(step=self.late.step, told_at=self.late.told_at)
        if self.unheard:
            text += _PARTED.format(step=self.late.step)
        return text


class Conclusions:
    def __init__(
        self, context: Context, kept: KeptCalls, effects: Effects, passes: PassHistory
    ) -> None:
        self.context = context
        self._kept = kept
        self._passes = passes
        self.diagnosis = StepDiagnosis(context, kept, effects)
        self._errors = {trap.rule.id: trap.compiled.error for trap in effects.traps}

    def tripped(self, counter: StepCounter) -> Tripped:
        """Return the update that a counter is about to count, if the host decides on it."""
        kept = self._kept
        scale = self._passes.scale(counter)
        return Tripped(counter.step, kept.step, kept.sample_ids, scale)

    def conclude(
        self,
        counter: StepCounter,
        findings: Findings,
        heard: Heard,
        *,
        alike: bool = False,
        moved: bool = False,
        late: Tripped | None = None,
    ) -> StopReason | None:
        """Report the findings of this rank, ``alike`` if all ranks have equal ones, and return the decision of all ranks.

        An update whose optimizer may have ``moved`` weights already cannot be skipped. With ``late`` the device decided.
        """
        if heard.unanimous and not any(findings.values()):
            # All ranks saw the non-finite gradient and all ran the code that repaired it.
            heard = ALONE
        is_unheard = heard is not ALONE and heard.severity <= FINE and not alike
        self._count(counter, findings, heard)
        trips = []
        for trap, report in findings.items():
            if report is not None:
                # Norms at the update are alike on all ranks, so the others trip also.
                unheard = is_unheard and trap.votes
                in_a_row = counter.trips_now[trap.rule.id]
                trips.append(Trip(trap, in_a_row, report, unheard, moved, late))
        if not trips and not heard.objections:
            return None
        tripped = late or self.tripped(counter)
        reports = {trip.rule: trip.report for trip in trips}
        diagnoses = self.diagnosis.diagnose_trips(reports, tripped, heard)
        # The other ranks must hear of the most severe trip.
        worst = max([trip.severity for trip in trips], default=FINE)
        causes: dict[int, StopReason] = {}
        for trip in trips:
            # A rule with a more severe trip holds the update back.
            is_decisive = trip.severity >= max(worst, heard.severity)
            diagnosis = diagnoses.get(trip.rule)
            cause = self._emit(trip, tripped, heard.guilty, diagnosis, is_decisive=is_decisive)
            causes.setdefault(trip.severity, cause)
        if heard.severity > worst:
            objection = heard.worst
            return self._follow(tripped, objection, diagnoses.get(objection.rule), moved=moved)
        if worst == FINE or not self.context.acts:
            return None
        return replace(causes[worst], skips=worst < RAISE)

    def _count(self, counter: StepCounter, findings: Findings, heard: Heard) -> None:
        """Count the consecutive updates in which traps tripped on any rank; a trap that found nothing restarts at 0."""
        tripped = {trap.rule.id: report is not None for trap, report in findings.items()}
        for objection in heard.objections:
            if objection.rule:
                tripped[objection.rule] = True
        for rule, is_trip in tripped.items():
            # `StepCounter.tick` makes the count final: an update is judged after each call of a closure.
            counter.trips_now[rule] = 0
            if is_trip:
                counter.trips_now[rule] = counter.trips.get(rule, 0) + 1

    def _follow(
        self, tripped: Tripped, objection: Objection, diagnosis: Diagnosis | None, *, moved: bool
    ) -> StopReason | None:
        """Do what the objection of another rank demands."""
        stops = moved or objection.severity == RAISE
        kind: EventKind = "trap" if stops else "skipped-step"
        step = tripped.step
        rule = objection.rule
        text = objection.text
        if rule:
            what = "stop" if stops else "skip the step"
            text = f"step {step}: rank {objection.rank} trapped, and all ranks {what}: {text}"
            text = "\n".join([text, *diagnosis_lines(diagnosis)])
        log = self.context.event_log
        facts = event_keys(diagnosis, tripped)
        log.emit(kind, text, rule=rule, step=step, name=objection.name, quiet=stops, facts=facts)
        error = self._errors.get(rule, NonFiniteGradientError)
        rank = objection.rank
        return StopReason(step, rank, rule, objection.name, text, diagnosis, error, not stops)

    def _emit(
        self,
        trip: Trip,
        tripped: Tripped,
        ranks: tuple[int, ...],
        diagnosis: Diagnosis | None,
        *,
        is_decisive: bool,
    ) -> StopReason:
        """Emit the report of a trap, and return it; ``ranks`` are the ranks that put NaN or Inf into an average."""
        context = self.context
        step = tripped.step
        rule = trip.rule
        report = trip.report.caused_by(ranks)
        then = trip.then
        outcome = trip.outcome()
        if not context.acts:
            then = ""
            outcome = _OBSERVES.format(then=trip.trap.then)
        elif not is_decisive:
            outcome = _HELD_BACK
        keys = event_keys(diagnosis, tripped)
        text, shown = texts(context.place(step, rule), report, outcome, diagnosis, keys)
        log = context.event_log
        where: dict[str, Any] = {"rule": rule, "step": step, "name": report.name}
        log.count_changed(rule, 1)
        decision = trip.trap.compiled
        where |= {"warn": then == "warn", "quiet": then == "raise"}
        log.emit(decision.kind, text, **where, facts=keys, shown=shown)
        if then == "skip-step" and is_decisive:
            text_of_skip = f"step {step} skipped: {trip.how_skipped}"
            log.emit("skipped-step", text_of_skip, **where, facts={"told_at": tripped.told_at})
        rank = _dist.rank()
        if report.ranks:
            rank = report.ranks[0]
        return StopReason(step, rank, rule, report.name, text, diagnosis, decision.error)
