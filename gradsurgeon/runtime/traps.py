"""What traps decide on an update: taken right before it, reported by what was seen after backward."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Decision, Spikes
from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.distributed.ranks import FINE, OVERFLOWED, RAISE, SKIP, Cause
from gradsurgeon.events import EventKind
from gradsurgeon.runtime.activation_flags import Flag
from gradsurgeon.runtime.context import Context, Mode
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.gradient_rules import GradientSnapshot
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.kept_calls import KeptCalls
from gradsurgeon.runtime.nonfinite_report import (
    GradientEvidence,
    TrapReport,
    activation_report,
    gradient_report,
    threshold_report,
    uncounted,
)
from gradsurgeon.runtime.notices import shorten_names
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.runtime.spike_report import spike_report
from gradsurgeon.runtime.spike_traps import SpikeTraps
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.step_diagnosis import StepDiagnosis
from gradsurgeon.runtime.training_events import StepDecision
from gradsurgeon.tensors import measure

_OVERFLOW = (
    "step {step}: all ranks skip the step, because the GradScaler of rank {rank} does: the scaled gradients "
    "overflowed there and not everywhere, so that its scale differs from that of the others from now on"
)
_REPAIRED = (
    "{number} gradients were non-finite after backward and finite at the update ({names}): repaired in "
    "between, no trap"
)
SCALER_SKIP = "the GradScaler skipped step {step}: the scaled gradients overflowed"

# The id of a trap that has judged, and its report where it has tripped.
_Finding = tuple[str, TrapReport | None]


@dataclass(frozen=True, slots=True)
class Trip:
    """A trap that has tripped: what it reports, and how often it has done so in a row."""

    rule: str
    decision: Decision | Spikes
    in_a_row: int
    report: TrapReport

    @property
    def then(self) -> str:
        gives_up = self.in_a_row >= self.decision.give_up_after
        return "raise" if gives_up else self.decision.then

    @property
    def severity(self) -> int:
        return {"raise": RAISE, "skip-step": SKIP, "warn": FINE}[self.then]

    def outcome(self, mode: Mode) -> str:
        """Return what becomes of the step, as a line of the report."""
        if mode == "observe":
            return f"observing only: `then: {self.decision.then}` would have acted"
        if self.then != self.decision.then:
            return (
                f"giving up: tripped {self.in_a_row} times in a row "
                f"(give_up_after: {self.decision.give_up_after})"
            )
        return {
            "raise": "stopped before the update: no weight was moved",
            "skip-step": "step skipped: no weight and no optimizer state was touched",
            "warn": "the update goes on (`then: warn`)" + self.report.expect,
        }[self.then]


class Traps:
    def __init__(
        self, context: Context, agreement: RankAgreement, kept: KeptCalls, spikes: SpikeTraps
    ) -> None:
        self._context = context
        self._spikes = spikes
        self._diagnosis = StepDiagnosis(context, kept)
        self._agreement = agreement
        # How often in a row traps have tripped, by rule and tensor: a script may rebuild its optimizer.
        self._in_a_row: dict[tuple[str, int], int] = {}
        # The same with the current update, which is judged after each call of a closure.
        self._with_this: dict[StepCounter, dict[str, int]] = defaultdict(dict)
        # How often in a row scalers have skipped a step.
        self._scaler_skips: Counter[StepCounter] = Counter()
        # What was seen after each backward pass of the current step.
        self._snapshots: defaultdict[StepCounter, list[GradientSnapshot]] = defaultdict(list)

    @property
    def keeps_calls(self) -> bool:
        """Whether the next trip of some rule is diagnosed."""
        return bool(self._diagnosis.pending)

    def add_snapshot(self, counter: StepCounter, snapshot: GradientSnapshot) -> None:
        if self._context.program.traps or self._context.due_rules(counter).reported:
            snapshots = self._snapshots[counter]
            # A step of many micro-batches must not keep the graph of each.
            snapshots[-1:] = [earlier.without_graph() for earlier in snapshots[-1:]]
            snapshots.append(snapshot)

    def in_a_row(self) -> dict[str, dict[str, int]]:
        """Return how often in a row traps have tripped, by rule and parameter."""
        names = self._context.program.names
        found: dict[str, dict[str, int]] = {}
        for (rule, tensor), number in self._in_a_row.items():
            found.setdefault(rule, {})[names[tensor]] = number
        return found

    def resume(self, in_a_row: Mapping[str, Mapping[str, int]], index: Mapping[str, int]) -> None:
        """Go on counting what `in_a_row` has returned, with the number of each parameter by its name."""
        self._in_a_row = {
            (rule, index[name]): number
            for rule, rows in in_a_row.items()
            for name, number in rows.items()
            if number and name in index
        }

    def _row(self, counter: StepCounter, rule: str) -> int:
        rows = (self._in_a_row.get((rule, tensor), 0) for tensor in counter.tensors)
        return max(rows, default=0)

    def _set_row(self, counter: StepCounter, rule: str, number: int) -> None:
        if number:
            self._in_a_row.update({(rule, tensor): number for tensor in counter.tensors})
        elif self._in_a_row:
            for tensor in counter.tensors:
                self._in_a_row.pop((rule, tensor), None)

    def done(self, counter: StepCounter) -> None:
        self._snapshots.pop(counter, None)
        for rule, times in self._with_this.pop(counter, {}).items():
            self._set_row(counter, rule, times)

    def decide(
        self, counter: StepCounter, gradients: Gradients, overflow: Tensor | None = None
    ) -> StepDecision:
        """Judge what the optimizer is about to consume. Reads the device once, and again for a report."""
        self._scaler_skips[counter] = 0
        findings = [
            *self._judge_gradients(counter, gradients, overflow),
            *self._judge_thresholds(counter, gradients),
        ]
        return self._conclude(counter, [*findings, *self._judge_activations(counter)])

    def decide_edited(self, counter: StepCounter, edited: set[int]) -> StepDecision:
        """Judge gradients once more that rules at `step` may have made non-finite."""
        context, due_rules = self._context, self._context.due_rules(counter)
        gradients = context.parameters.grads(sorted(edited.intersection(due_rules.trapped)))
        (doubtful,) = measure.nonfinite(measure.norms(*gradients))
        bad = measure.counts(dict(zip(*context.parameters.grads(doubtful), strict=True)))
        order, _ = context.parameters.grads(due_rules.trapped)
        moment = "right before the update, and finite before the rules at `step`"
        findings = [
            (bound.rule.id, gradient_report(context.program.names, moment, order, bad, {}))
            for bound in due_rules.traps
            if not bad.keys().isdisjoint(bound.tensors)
        ]
        return self._conclude(counter, findings)

    def measure(self, counter: StepCounter, gradients: Gradients) -> None:
        """Take part in what other ranks measure, and make nothing of it."""
        self._judge_gradients(counter, gradients)
        self._judge_thresholds(counter, gradients)

    def rest(self, counter: StepCounter) -> StepDecision:
        """Judge nothing, and do what other ranks have decided, who may wait for this one."""
        return self._conclude(counter, [])

    def skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Note a step that a scaler has skipped; raise where that is no overflow, but a NaN that stays."""
        findings = self._judge_skip_of_scaler(counter, scale)
        decision = self._conclude(counter, findings, floor=OVERFLOWED)
        if decision.error is not None:
            raise decision.error

    def _judge_gradients(
        self, counter: StepCounter, gradients: Gradients, overflow: Tensor | None = None
    ) -> list[_Finding]:
        context, due_rules = self._context, self._context.due_rules(counter)
        tensors = gradients.having(due_rules.trapped)
        norms = gradients.take_norms(tensors) if tensors else ()
        judged = self._spikes.judge(counter, gradients, overflow)
        snapshots = self._snapshots[counter] if tensors else []
        # What was seen after backward comes to the host along with what is there now, and what is a spike.
        flags = [one.flags for one in judged]
        before, doubtful, *spikes = measure.nonfinite(
            snapshots[-1].norms if snapshots else (), norms, *flags
        )
        findings: list[_Finding] = []
        for one, tripped in zip(judged, spikes, strict=True):
            report = None
            if tripped:
                arrived = _arrived(self._snapshots[counter])
                report = spike_report(context.program.names, one, arrived)
            self._spikes.follow(one, counter.step, tripped=bool(tripped))
            findings.append((one.bound_rule.rule.id, report))
        fired = [bound for bound in due_rules.traps if any(i in gradients for i in bound.tensors)]
        for bound in fired:
            context.event_log.count_fired(bound.rule.id, counter.step)
        if not (before or doubtful):
            return [*((bound.rule.id, None) for bound in fired), *findings]
        bad = measure.counts(dict(zip(doubtful, gradients.of(doubtful), strict=True)))
        evidence = GradientEvidence(snapshots, tensors, bad, norms)
        for bound in fired:
            repaired = [tensor for tensor in bound.tensors if tensor in evidence.repaired]
            if repaired and bad.keys().isdisjoint(bound.tensors):
                names = [context.program.names[tensor] for tensor in repaired]
                text = _REPAIRED.format(number=len(names), names=shorten_names(names))
                step, name = counter.step, names[0]
                context.event_log.emit("notice", text, rule=bound.rule.id, step=step, name=name)
        return [*self._findings(fired, evidence), *findings]

    def _judge_thresholds(self, counter: StepCounter, gradients: Gradients) -> list[_Finding]:
        """Judge by any statistic. Reads the device once per rule, and again only for a report."""
        context = self._context
        findings: list[_Finding] = []
        for bound in context.due_rules(counter).thresholds:
            tensors = gradients.having(bound.tensors)
            if not tensors:
                continue
            context.event_log.count_fired(bound.rule.id, counter.step)
            decision, report = context.decisions[bound.rule.id], None
            assert isinstance(decision, Decision)  # noqa: S101 # it has a threshold
            values = gradients.statistics(decision.statistic, tensors)
            tripped = decision.trips(values).tolist()
            if any(tripped):
                names = [context.program.names[tensor] for tensor in tensors]
                report = threshold_report(decision.statistic, names, values.tolist(), tripped)
            findings.append((bound.rule.id, report))
        return findings

    def _judge_activations(self, counter: StepCounter) -> list[_Finding]:
        by_rule: defaultdict[str, list[tuple[Flag, int]]] = defaultdict(list)
        for flag, count in self._context.flags.take(counter, self._context.counters.common):
            by_rule[flag.rule.id].append((flag, count))
        return [
            (rule, activation_report(flags) if any(count for _, count in flags) else None)
            for rule, flags in by_rule.items()
        ]

    def _judge_skip_of_scaler(self, counter: StepCounter, scale: Tensor) -> list[_Finding]:
        context = self._context
        self._scaler_skips[counter] += 1
        skips, low = self._scaler_skips[counter], float(scale) < 1.0
        text = SCALER_SKIP.format(step=counter.step)
        context.event_log.emit("scaler-skip", text, step=counter.step)
        due_rules = context.due_rules(counter)
        patience = {rule: decision.give_up_after for rule, decision in context.decisions.items()}
        stuck = [bound for bound in due_rules.traps if low or skips >= patience[bound.rule.id]]
        if not stuck or context.mode == "observe":
            return []
        # A scaler looks before the script can repair or clip, and so must the trap.
        if (snapshots := self._snapshots[counter]) and snapshots[-1].norms:
            seen = snapshots[-1].norms
        else:
            seen = measure.norms(*context.parameters.grads(due_rules.trapped))
        norms = measure.as_dict(seen)
        bad = {tensor: uncounted(norm) for tensor, norm in norms.items() if not math.isfinite(norm)}
        # A skip for what a trap does not watch says nothing of it: its row goes on.
        guilty = [bound for bound in stuck if not bad.keys().isdisjoint(bound.tensors)]
        for bound in guilty:
            # This trip is one too many, as those after it, until the trap finds nothing.
            rule = bound.rule.id
            self._set_row(counter, rule, max(self._row(counter, rule), patience[rule] - 1))
        why = "its scale is below 1" if low else f"{skips} steps in a row"
        evidence = GradientEvidence(snapshots, list(norms), bad)
        return self._findings(guilty, evidence, f"the GradScaler keeps skipping ({why}): ")

    def _findings(
        self, bound_rules: Iterable[BoundRule], evidence: GradientEvidence, why: str = ""
    ) -> list[_Finding]:
        names, bad = self._context.program.names, evidence.now.keys()
        return [
            (bound.rule.id, None if bad.isdisjoint(bound.tensors) else evidence.report(names, why))
            for bound in bound_rules
        ]

    def _conclude(
        self, counter: StepCounter, findings: Sequence[_Finding], *, floor: int = FINE
    ) -> StepDecision:
        """Report what this rank has seen, and return what all ranks do. A collective where they meet."""
        context, step = self._context, counter.step
        trips = self._count(counter, findings)
        severity = max([floor, *(trip.severity for trip in trips)])
        guilty = any(trip.report.guilty for trip in trips)
        meeting = self._agreement.meet(counter, severity, guilty=guilty)
        reports = {trip.rule: trip.report for trip in trips}
        diagnoses = self._diagnosis.of(reports, step, self._scale(counter), meeting)
        told = [
            (trip.severity, self._tell(trip, step, meeting.guilty, diagnoses.get(trip.rule)))
            for trip in trips
        ]
        # What stops a step is what the other ranks have to hear of.
        worst, cause = max(told, key=itemgetter(0), default=(FINE, None))
        decision = StepDecision()
        if cause is not None and worst > FINE and context.mode == "act":
            decision = _decided(worst, cause, step)
        if not meeting.groups or meeting.severity == FINE:
            return decision
        rank = _dist.rank()
        overflow = Cause(rank, "", "", _OVERFLOW.format(step=step, rank=rank))
        heard = meeting.hear(decision.cause or overflow)
        if meeting.severity > severity:
            return self._follow(step, meeting.severity, heard)
        return decision

    def _count(self, counter: StepCounter, findings: Sequence[_Finding]) -> list[Trip]:
        """Count in how many updates in a row traps have tripped; one that has found nothing begins anew."""
        trips = []
        for rule, report in findings:
            times = 0 if report is None else self._row(counter, rule) + 1
            self._with_this[counter][rule] = times
            if report is not None:
                trips.append(Trip(rule, self._context.decisions[rule], times, report))
        return trips

    def _follow(self, step: int, severity: int, cause: Cause) -> StepDecision:
        raised = severity == RAISE
        text = cause.text
        if cause.rule:
            what = "stop" if raised else "skip the step"
            text = f"step {step}: rank {cause.rank} trapped, and all ranks {what}: {text}"
        where: dict[str, Any] = {"rule": cause.rule, "step": step, "name": cause.name}
        kind: EventKind = cause.kind if raised else "skipped-step"
        self._context.event_log.emit(kind, text, **where, quiet=raised)
        return _decided(severity, replace(cause, text=text), step)

    def _scale(self, counter: StepCounter) -> Tensor | None:
        passes = [snapshot.done for snapshot in self._snapshots[counter]]
        return next((done.scale for done in passes if done.scale is not None), None)

    def _tell(
        self, trip: Trip, step: int, ranks: tuple[int, ...], diagnosis: Diagnosis | None
    ) -> Cause:
        """Say what a trap has found; ``ranks`` contributed what is not finite to an average."""
        context, report = self._context, trip.report.caused_by(ranks)
        head = f"{context.place(step, trip.rule)}: {report.head}"
        told: list[str] = [] if diagnosis is None else list(diagnosis.text())
        if diagnosis is not None and diagnosis.rank != _dist.rank():
            told[:0] = [f"found by rank {diagnosis.rank}, in its part of the batch:"]
        text = "\n".join([head, trip.outcome(context.mode), *report.lines, *told])
        where: dict[str, Any] = {"rule": trip.rule, "step": step, "name": report.name}
        then = trip.then if context.mode == "act" else ""
        context.event_log.count_changed(trip.rule, 1)
        kind: Literal["trap", "spike"] = "spike" if isinstance(trip.decision, Spikes) else "trap"
        context.event_log.emit(kind, text, **where, warn=then == "warn", quiet=then == "raise")
        if then == "skip-step":
            message = f"step {step} skipped: no weight and no optimizer state was touched"
            context.event_log.emit("skipped-step", message, **where)
        rank = report.ranks[0] if report.ranks else _dist.rank()
        return Cause(rank, trip.rule, report.name, text, diagnosis, kind)


def _arrived(snapshots: Sequence[GradientSnapshot]) -> list[list[int]]:
    """Return in which order the gradients of an update came; nothing where its passes differ in what they reach."""
    reached = {frozenset(snapshot.done.tensors) for snapshot in snapshots}
    return snapshots[-1].arrived if len(reached) == 1 else []


def _decided(severity: int, cause: Cause, step: int) -> StepDecision:
    if severity < RAISE:
        return StepDecision(skip=True, cause=cause)
    return StepDecision(error=cause.error(step), cause=cause)
