"""Decides on an update after traps judged it: writes this rank's report and takes the decision of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Decision, Spikes
from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.distributed.ranks import FINE, RAISE, StopReason
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import NONFINITE
from gradsurgeon.runtime.rank_agreement import ALONE, Heard
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.step_diagnosis import StepDiagnosis
from gradsurgeon.runtime.training_events import GOES_ON, StepDecision
from gradsurgeon.runtime.trips import TOO_LATE, UNKNOWN, Finding, Rows, Trip


class Conclusions:
    def __init__(self, context: Context, kept: KeptCalls, rows: Rows) -> None:
        self._context = context
        self._rows = rows
        self.diagnosis = StepDiagnosis(context, kept)

    def of(
        self,
        counter: StepCounter,
        findings: Sequence[Finding],
        heard: Heard,
        scale: Tensor | None,
        *,
        known: bool = False,
    ) -> StepDecision:
        """Report the findings of this rank, and return the decision of all ranks.

        Args:
            counter: the counter of the update.
            findings: the findings of the traps of this rank.
            heard: the votes of the ranks.
            scale: the factor of a `GradScaler`.
            known: whether all ranks have equal findings, whatever their votes were.
        """
        context, step = self._context, counter.step
        if heard.unanimous and not any(report for _, report in findings):
            # All ranks saw the non-finite gradient and all ran the code that repaired it.
            heard = ALONE
        trips = self._count(counter, findings, heard)
        if not (trips or heard.objections):
            return GOES_ON
        if heard is not ALONE and heard.severity <= FINE and not known:
            why = TOO_LATE if heard.known else UNKNOWN
            trips = [
                replace(trip, unheard=why if _is_nonfinite(trip.decision) else "") for trip in trips
            ]
        reports = {trip.rule: trip.report for trip in trips}
        diagnoses = self.diagnosis.of(reports, step, scale, heard)
        told = [
            (trip.severity, self._tell(trip, step, heard.guilty, diagnoses.get(trip.rule)))
            for trip in trips
        ]
        # The other ranks must hear of the most severe trip.
        worst, cause = max(told, key=itemgetter(0), default=(FINE, None))
        decision = StepDecision()
        if cause is not None and worst > FINE and context.mode == "act":
            decision = _decided(worst, cause, step)
        if heard.severity <= worst:
            return decision
        return self._follow(step, heard.worst, diagnoses.get(heard.worst.rule))

    def _count(self, counter: StepCounter, findings: Sequence[Finding], heard: Heard) -> list[Trip]:
        """Count the consecutive updates in which traps tripped on any rank; a trap that found nothing restarts at 0."""
        trips, elsewhere = [], {one.rule for one in heard.objections if one.rule}
        judged = dict.fromkeys(rule for rule, _ in findings)
        absent = [(rule, None) for rule in sorted(elsewhere - judged.keys())]
        for rule, report in [*findings, *absent]:
            tripped = report is not None or rule in elsewhere
            times = self._rows.count(counter, rule, tripped=tripped)
            if report is not None:
                trips.append(Trip(rule, self._context.decisions[rule], times, report))
        return trips

    def _follow(self, step: int, told: Objection, diagnosis: Diagnosis | None) -> StepDecision:
        raised, text = told.severity == RAISE, told.text
        if told.rule:
            what = "stop" if raised else "skip the step"
            text = f"step {step}: rank {told.rank} trapped, and all ranks {what}: {text}"
            text = "\n".join([text, *_diagnosed(diagnosis)])
        where: dict[str, Any] = {"rule": told.rule, "step": step, "name": told.name}
        self._context.event_log.emit(
            "trap" if raised else "skipped-step", text, **where, quiet=raised
        )
        cause = StopReason(told.rank, told.rule, told.name, text, diagnosis)
        return _decided(told.severity, cause, step)

    def head(self, step: int, trip: Trip, ranks: tuple[int, ...] = ()) -> str:
        """Return the first line of a report; ``ranks`` are the ranks that put NaN or Inf into an average."""
        return f"{self._context.place(step, trip.rule)}: {trip.report.caused_by(ranks).head}"

    def _tell(
        self, trip: Trip, step: int, ranks: tuple[int, ...], diagnosis: Diagnosis | None
    ) -> StopReason:
        """Emit the report of a trap, and return it; ``ranks`` are the ranks that put NaN or Inf into an average."""
        context, report = self._context, trip.report.caused_by(ranks)
        head = self.head(step, trip, ranks)
        lines = [head, trip.outcome(context.mode), *report.lines, *_diagnosed(diagnosis)]
        text = "\n".join(lines)
        where: dict[str, Any] = {"rule": trip.rule, "step": step, "name": report.name}
        then = trip.then if context.mode == "act" else ""
        context.event_log.count_changed(trip.rule, 1)
        context.event_log.emit(
            trip.decision.kind, text, **where, warn=then == "warn", quiet=then == "raise"
        )
        if then == "skip-step":
            message = f"step {step} skipped: no weight and no optimizer state was touched"
            context.event_log.emit("skipped-step", message, **where)
        rank = report.ranks[0] if report.ranks else _dist.rank()
        return StopReason(rank, trip.rule, report.name, text, diagnosis, trip.decision.error)


def _diagnosed(diagnosis: Diagnosis | None) -> list[str]:
    """Return a diagnosis as lines of a report."""
    if diagnosis is None:
        return []
    elsewhere = diagnosis.rank != _dist.rank()
    head = f"found by rank {diagnosis.rank}, in its part of the batch:"
    return [*([head] if elsewhere else ()), *diagnosis.text()]


def _is_nonfinite(decision: Decision | Spikes) -> bool:
    return isinstance(decision, Decision) and decision.statistic == NONFINITE


def _decided(severity: int, cause: StopReason, step: int) -> StepDecision:
    if severity < RAISE:
        return StepDecision(skip=True, cause=cause)
    return StepDecision(error=cause.error(step), cause=cause)
