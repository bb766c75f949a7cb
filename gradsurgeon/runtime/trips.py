"""The outcome of an update after traps judged it: trips and rows of trips, reports, and the decision of all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gradsurgeon.actions import Decision, Spikes
from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.events import EventKind
from gradsurgeon.distributed.ranks import FINE, RAISE, SKIP, StopReason
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.context import Context, Mode
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.step_diagnosis import StepDiagnosis
from gradsurgeon.runtime.training_events import GOES_ON, StepDecision
from gradsurgeon.runtime.trap_effects import Trap
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
_HELD_BACK = "another rule holds this update back"
# Each trap that judged, with its report if it tripped.
Findings = Mapping[Trap, TrapReport | None]


@dataclass(frozen=True, slots=True)
class Trip:
    """A tripped trap: its report, and the number of trips in a row."""

    trap: Trap
    in_a_row: int
    report: TrapReport
    # Whether the other ranks may not know of it.
    unheard: bool = False
    # Whether the optimizer may have moved weights in this step already.
    moved: bool = False

    @property
    def rule(self) -> str:
        return self.trap.rule.id

    @property
    def decision(self) -> Decision | Spikes:
        return self.trap.decision

    @property
    def then(self) -> str:
        if self._gives_up or self._is_forced:
            return "raise"
        return self.decision.then

    @property
    def _gives_up(self) -> bool:
        return self.in_a_row >= self.decision.patience

    @property
    def _is_forced(self) -> bool:
        """Whether this rank cannot skip the step, although its rule would."""
        if self.decision.then != "skip-step":
            return False
        return self.unheard or self.moved

    @property
    def severity(self) -> int:
        return {"raise": RAISE, "skip-step": SKIP, "warn": FINE}[self.then]

    def outcome(self, mode: Mode) -> str:
        """Return the outcome of the step, as a line of the report, if no other rule is more severe."""
        if mode == "observe":
            return f"observing only: `then: {self.decision.then}` would have acted"
        if self._is_forced and not self.moved:
            return NOT_VOTED
        if self._gives_up and self.decision.then != "raise":
            limit = f"(give_up_after: {self.decision.give_up_after})"
            return f"giving up: tripped {self.in_a_row} times in a row {limit}"
        if self.then == "skip-step":
            return f"step skipped: {_HIDDEN}"
        if self.then == "warn":
            return self.report.goes_on
        return _MOVED if self.moved else "stopped before the update: no weight was moved"


class Conclusions:
    def __init__(self, context: Context, kept: KeptCalls, effects: Effects) -> None:
        self._context = context
        self._kept = kept
        self.diagnosis = StepDiagnosis(context, kept, effects)

    def conclude(
        self,
        counter: StepCounter,
        findings: Findings,
        heard: Heard,
        scale: Tensor | None,
        *,
        alike: bool = False,
        moved: bool = False,
    ) -> StepDecision:
        """Report the findings of this rank, ``alike`` if all ranks have equal ones, and return the decision of all ranks.

        An update whose optimizer may have ``moved`` weights already cannot be skipped.
        """
        step = counter.step
        if heard.unanimous and not any(findings.values()):
            # All ranks saw the non-finite gradient and all ran the code that repaired it.
            heard = ALONE
        is_unheard = heard is not ALONE and heard.severity <= FINE and not alike
        self._count(counter, findings, heard)
        trips = []
        reports = {}
        for trap, report in findings.items():
            if report is not None:
                # Norms at the update are alike on all ranks, so the others trip also.
                unheard = is_unheard and trap.votes
                in_a_row = counter.trips_now[trap.rule.id]
                trips.append(Trip(trap, in_a_row, report, unheard, moved))
                reports[trap.rule.id] = report
        if not trips and not heard.objections:
            return GOES_ON
        diagnoses = self.diagnosis.diagnose_trips(reports, step, scale, heard)
        # The other ranks must hear of the most severe trip.
        worst = max([trip.severity for trip in trips], default=FINE)
        decided = max(worst, heard.severity)
        cause: StopReason | None = None
        for trip in trips:
            reason = self._emit(trip, step, heard.guilty, diagnoses.get(trip.rule), decided)
            if cause is None and trip.severity == worst:
                cause = reason
        if heard.severity > worst:
            return self._follow(step, heard.worst, diagnoses.get(heard.worst.rule), moved=moved)
        if cause is None or worst == FINE or self._context.mode == "observe":
            return GOES_ON
        return _decided(worst, cause, step)

    def _count(self, counter: StepCounter, findings: Findings, heard: Heard) -> None:
        """Count the consecutive updates in which traps tripped on any rank; a trap that found nothing restarts at 0."""
        tripped: dict[str, bool] = {}
        for trap, report in findings.items():
            tripped[trap.rule.id] = report is not None
        for objection in heard.objections:
            if objection.rule:
                tripped[objection.rule] = True
        for rule, is_trip in tripped.items():
            # `StepCounter.tick` makes the count final: an update is judged after each call of a closure.
            counter.trips_now[rule] = 0
            if is_trip:
                counter.trips_now[rule] = counter.trips.get(rule, 0) + 1

    def _follow(
        self, step: int, objection: Objection, diagnosis: Diagnosis | None, *, moved: bool
    ) -> StepDecision:
        """Do what the objection of another rank demands."""
        severity = objection.severity
        if moved:
            severity = RAISE
        stops = severity == RAISE
        kind: EventKind = "trap" if stops else "skipped-step"
        rule = objection.rule
        text = objection.text
        if rule:
            what = "stop" if stops else "skip the step"
            text = f"step {step}: rank {objection.rank} trapped, and all ranks {what}: {text}"
            text = "\n".join([text, *diagnosis_lines(diagnosis)])
        log = self._context.event_log
        facts = event_keys(diagnosis, self._kept.sample_ids)
        log.emit(kind, text, rule=rule, step=step, name=objection.name, quiet=stops, facts=facts)
        cause = StopReason(objection.rank, rule, objection.name, text, diagnosis)
        return _decided(severity, cause, step)

    def head(self, step: int, trip: Trip, ranks: tuple[int, ...] = ()) -> str:
        """Return the first line of a report; ``ranks`` are the ranks that put NaN or Inf into an average."""
        return f"{self._context.place(step, trip.rule)}: {trip.report.caused_by(ranks).head}"

    def _emit(
        self,
        trip: Trip,
        step: int,
        ranks: tuple[int, ...],
        diagnosis: Diagnosis | None,
        decided: int,
    ) -> StopReason:
        """Emit the report of a trap, and return it; ``ranks`` are the ranks that put NaN or Inf into an average."""
        context = self._context
        report = trip.report.caused_by(ranks)
        outcome = trip.outcome(context.mode)
        if context.mode == "act" and trip.severity < decided:
            outcome = _HELD_BACK
        keys = event_keys(diagnosis, self._kept.sample_ids)
        place = context.place(step, trip.rule)
        text, shown = texts(place, report, outcome, diagnosis, keys["sample_ids"])
        log = context.event_log
        where: dict[str, Any] = {"rule": trip.rule, "step": step, "name": report.name}
        then = trip.then if context.mode == "act" else ""
        log.count_changed(trip.rule, 1)
        log.emit(
            trip.decision.kind,
            text,
            **where,
            warn=then == "warn",
            quiet=then == "raise",
            facts=keys,
            shown=shown,
        )
        if then == "skip-step" and trip.severity == decided:
            log.emit("skipped-step", f"step {step} skipped: {_HIDDEN}", **where)
        rank = _dist.rank()
        if report.ranks:
            rank = report.ranks[0]
        return StopReason(rank, trip.rule, report.name, text, diagnosis, trip.decision.error)


def _decided(severity: int, cause: StopReason, step: int) -> StepDecision:
    if severity < RAISE:
        return StepDecision(skip=True, cause=cause, stops=True)
    return StepDecision(error=partial(cause.error, step), cause=cause, stops=True)
