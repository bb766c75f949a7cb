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
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.errors import shorten_names
from gradsurgeon.runtime.activation_flags import Flag
from gradsurgeon.runtime.context import Context, Mode
from gradsurgeon.runtime.due_rules import NONFINITE, BoundRule
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
from gradsurgeon.runtime.rank_agreement import ALONE, Heard, decides
from gradsurgeon.runtime.spike_report import spike_report
from gradsurgeon.runtime.spike_traps import SpikeTraps
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.step_diagnosis import StepDiagnosis
from gradsurgeon.runtime.training_events import BackwardPass, StepDecision
from gradsurgeon.tensors import measure
from gradsurgeon.tensors.measure import NonfiniteCount

_OVERFLOW = (
    "step {step}: all ranks skip the step, because the GradScaler of rank {rank} does: the scaled gradients "
    "overflowed there and not everywhere, so that its scale differs from that of the others from now on"
)
_REPAIRED = (
    "{number} gradients were non-finite after backward and finite at the update ({names}): repaired in "
    "between, no trap"
)
_TOO_LATE = (
    "stopped on this rank before the update: the gradients were finite when the ranks voted, right after backward, so that "
    "the others may go on with the update, and a rank that skips it alone ends up with other weights than they have. "
    "Look at what changes gradients between backward and the update"
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
    # Whether the ranks have voted on the update before there was anything to find.
    unheard: bool = False

    @property
    def then(self) -> str:
        gives_up = self.in_a_row >= self.decision.give_up_after
        return "raise" if gives_up or self._is_forced else self.decision.then

    @property
    def _is_forced(self) -> bool:
        return self.unheard and self.decision.then == "skip-step"

    @property
    def severity(self) -> int:
        return {"raise": RAISE, "skip-step": SKIP, "warn": FINE}[self.then]

    def outcome(self, mode: Mode) -> str:
        """Return what becomes of the step, as a line of the report."""
        if mode == "observe":
            return f"observing only: `then: {self.decision.then}` would have acted"
        if self._is_forced:
            return _TOO_LATE
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
    def __init__(self, context: Context, kept: KeptCalls, spikes: SpikeTraps) -> None:
        self._context = context
        self._spikes = spikes
        self._diagnosis = StepDiagnosis(context, kept)
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

    def objections(self, done: BackwardPass) -> list[Objection]:
        """Return what this rank has against the update after a pass. Reads the device once, and again for a report."""
        context, found = self._context, []
        for counter in context.counters.among(done.tensors):
            deciding = [one for one in context.due_rules(counter).traps if decides(one.rule)]
            snapshots = self._snapshots[counter] if deciding else []
            norms = snapshots[-1].norms if snapshots else ()
            (doubtful,) = measure.nonfinite(norms)
            if doubtful and done.scale is not None:
                found.append(self._overflow(counter))
                continue
            gradients = dict(zip(*context.parameters.grads(doubtful), strict=True))
            bad = measure.counts(gradients)
            evidence = GradientEvidence(snapshots, (), bad, norms)
            findings = [*self._findings(deciding, evidence), *self._flagged(counter)]
            parts = {tensor: one for tensor, one in bad.items() if one.ranks}
            found += [
                self._objection(
                    counter, Trip(rule, decision, self._row(counter, rule) + 1, report), parts
                )
                for rule, report in findings
                if report is not None and decides(decision := context.decisions[rule])
            ]
        return found

    def _objection(
        self, counter: StepCounter, trip: Trip, parts: Mapping[int, NonfiniteCount]
    ) -> Objection:
        names, report = self._context.program.names, trip.report
        return Objection(
            _dist.rank(),
            trip.rule,
            trip.severity,
            "trap",
            names[counter.tensors[0]],
            report.name,
            "\n".join([self._head(counter.step, trip), *report.lines]),
            report.guilty,
            {names[tensor]: (one.kind, one.number) for tensor, one in parts.items()},
        )

    def _overflow(self, counter: StepCounter) -> Objection:
        name, rank = self._context.program.names[counter.tensors[0]], _dist.rank()
        text = _OVERFLOW.format(step=counter.step, rank=rank)
        return Objection(rank, "", OVERFLOWED, "skipped-step", name, "", text)

    def decide(
        self,
        counter: StepCounter,
        gradients: Gradients,
        heard: Heard,
        overflow: Tensor | None = None,
    ) -> StepDecision:
        """Judge what the optimizer is about to consume. Reads the device once, and again for a report.

        Args:
            counter: of the update.
            gradients: as the script hands them over.
            heard: what the ranks have said of it.
            overflow: whether the optimizer is going to skip it, where only the device knows.
        """
        self._scaler_skips[counter] = 0
        findings = [
            *self._judge_gradients(counter, gradients, heard, overflow),
            *self._judge_thresholds(counter, gradients),
        ]
        return self._conclude(counter, [*findings, *self._judge_activations(counter)], heard)

    def decide_edited(self, counter: StepCounter, edited: set[int], heard: Heard) -> StepDecision:
        """Judge gradients once more that rules at `step` may have made non-finite. A collective where they are sharded.

        By the rules alone, which are those of all ranks, as are gradients that these average or divide: all find the same.
        """
        context, due_rules = self._context, self._context.due_rules(counter)
        gradients = context.parameters.grads(sorted(edited.intersection(due_rules.trapped)))
        norms = measure.norms(*gradients)
        (doubtful,) = measure.nonfinite(norms)
        suspects = dict(zip(*context.parameters.grads(doubtful), strict=True))
        bad, numbers = measure.counts(suspects), measure.as_dict(norms) if doubtful else {}
        divided = [tensor for tensor, grad in suspects.items() if _dist.is_sharded(grad)]
        bad |= {tensor: uncounted(numbers[tensor]) for tensor in divided if tensor not in bad}
        order, _ = context.parameters.grads(due_rules.trapped)
        moment = "right before the update, and finite before the rules at `step`"
        findings = [
            (bound.rule.id, gradient_report(context.program.names, moment, order, bad, {}))
            for bound in due_rules.traps
            if not bad.keys().isdisjoint(bound.tensors)
        ]
        known = _dist.world() > 1 and not context.ranks.own(bad)
        return self._conclude(counter, findings, heard, known=known)

    def measure(self, counter: StepCounter, gradients: Gradients) -> None:
        """Take part in what other ranks measure, and make nothing of it."""
        self._judge_gradients(counter, gradients, ALONE)
        self._judge_thresholds(counter, gradients)

    def rest(self, counter: StepCounter, heard: Heard) -> StepDecision:
        """Judge nothing, and do what the other ranks do."""
        return self._conclude(counter, [], heard)

    def skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Note a step that a scaler has skipped; raise where that is no overflow, but a NaN that stays."""
        findings = self._judge_skip_of_scaler(counter, scale)
        decision = self._conclude(counter, findings, ALONE)
        if decision.error is not None:
            raise decision.error

    def _judge_gradients(
        self,
        counter: StepCounter,
        gradients: Gradients,
        heard: Heard,
        overflow: Tensor | None = None,
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
        elsewhere = self._counted_elsewhere(gradients, heard)
        if not (before or doubtful or elsewhere):
            return [*((bound.rule.id, None) for bound in fired), *findings]
        bad = measure.counts(dict(zip(doubtful, gradients.of(doubtful), strict=True)))
        for tensor, others in elsewhere.items():
            own = [bad[tensor]] if tensor in bad else []
            bad[tensor] = measure.merged([*own, *others])
        divided = {t for t in tensors if _dist.is_sharded(gradients[t])}
        evidence = GradientEvidence(
            snapshots, tensors, bad, norms, frozenset(elsewhere), frozenset(divided)
        )
        for bound in fired:
            repaired = [tensor for tensor in bound.tensors if tensor in evidence.repaired]
            if repaired and bad.keys().isdisjoint(bound.tensors):
                names = [context.program.names[tensor] for tensor in repaired]
                text = _REPAIRED.format(number=len(names), names=shorten_names(names))
                step, name = counter.step, names[0]
                context.event_log.emit("notice", text, rule=bound.rule.id, step=step, name=name)
        return [*self._findings(fired, evidence), *findings]

    def _counted_elsewhere(
        self, gradients: Gradients, heard: Heard
    ) -> dict[int, list[NonfiniteCount]]:
        """Return what other ranks have found in their parts of gradients, by tensor."""
        found: dict[int, list[NonfiniteCount]] = {}
        told = [one for one in heard.objections if one.counts and one.rank != _dist.rank()]
        if not told:
            return found
        tensors = {name: tensor for tensor, name in enumerate(self._context.program.names)}
        for one in told:
            for name, (kind, number) in one.counts.items():
                tensor = tensors.get(name, -1)
                # Replicas hold the same part.
                if tensor in gradients and one.rank in _dist.sharing(gradients[tensor]):
                    part = NonfiniteCount(kind, number, (one.rank,))
                    # Rules that share parameters tell of the same.
                    if part not in found.setdefault(tensor, []):
                        found[tensor].append(part)
        return found

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
        return _reported(self._context.flags.take(counter, self._context.counters.common))

    def _flagged(self, counter: StepCounter) -> list[_Finding]:
        return _reported(self._context.flags.raised(counter, self._context.counters.common))

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
            seen = measure.norms_here(*context.parameters.grads(due_rules.trapped))
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
        self,
        counter: StepCounter,
        findings: Sequence[_Finding],
        heard: Heard,
        *,
        known: bool = False,
    ) -> StepDecision:
        """Report what this rank has seen, and return what all ranks do.

        Args:
            counter: of the update.
            findings: of the traps here.
            heard: what the ranks have said.
            known: whether all ranks find the same here, whatever they have said.
        """
        context, step = self._context, counter.step
        trips = self._count(counter, findings)
        if heard.unanimous and not trips:
            # All have seen it, and it is repaired: by what all of them have run.
            heard = ALONE
        if heard.voter is not None and heard.severity <= FINE and not known:
            trips = [replace(trip, unheard=_is_nonfinite(trip.decision)) for trip in trips]
        reports = {trip.rule: trip.report for trip in trips}
        diagnoses = self._diagnosis.of(reports, step, self._scale(counter), heard)
        told = [
            (trip.severity, self._tell(trip, step, heard.guilty, diagnoses.get(trip.rule)))
            for trip in trips
        ]
        # What stops a step is what the other ranks have to hear of.
        worst, cause = max(told, key=itemgetter(0), default=(FINE, None))
        decision = StepDecision()
        if cause is not None and worst > FINE and context.mode == "act":
            decision = _decided(worst, cause, step)
        if heard.severity <= worst:
            return decision
        return self._follow(step, heard.worst, diagnoses.get(heard.worst.rule))

    def _count(self, counter: StepCounter, findings: Sequence[_Finding]) -> list[Trip]:
        """Count in how many updates in a row traps have tripped; one that has found nothing begins anew."""
        trips = []
        for rule, report in findings:
            times = 0 if report is None else self._row(counter, rule) + 1
            self._with_this[counter][rule] = times
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
        cause = Cause(told.rank, told.rule, told.name, text, diagnosis)
        return _decided(told.severity, cause, step)

    def _head(self, step: int, trip: Trip, ranks: tuple[int, ...] = ()) -> str:
        """Return how a report begins; ``ranks`` contributed what is not finite to an average."""
        return f"{self._context.place(step, trip.rule)}: {trip.report.caused_by(ranks).head}"

    def _scale(self, counter: StepCounter) -> Tensor | None:
        passes = [snapshot.done for snapshot in self._snapshots[counter]]
        return next((done.scale for done in passes if done.scale is not None), None)

    def _tell(
        self, trip: Trip, step: int, ranks: tuple[int, ...], diagnosis: Diagnosis | None
    ) -> Cause:
        """Say what a trap has found; ``ranks`` contributed what is not finite to an average."""
        context, report = self._context, trip.report.caused_by(ranks)
        head = self._head(step, trip, ranks)
        lines = [head, trip.outcome(context.mode), *report.lines, *_diagnosed(diagnosis)]
        text = "\n".join(lines)
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


def _diagnosed(diagnosis: Diagnosis | None) -> list[str]:
    """Return what was found out about a step, as lines of a report."""
    if diagnosis is None:
        return []
    elsewhere = diagnosis.rank != _dist.rank()
    head = f"found by rank {diagnosis.rank}, in its part of the batch:"
    return [*([head] if elsewhere else ()), *diagnosis.text()]


def _is_nonfinite(decision: Decision | Spikes) -> bool:
    return isinstance(decision, Decision) and decision.statistic == NONFINITE


def _reported(flags: Iterable[tuple[Flag, int]]) -> list[_Finding]:
    by_rule: defaultdict[str, list[tuple[Flag, int]]] = defaultdict(list)
    for flag, count in flags:
        by_rule[flag.rule.id].append((flag, count))
    return [
        (rule, activation_report(of_rule) if any(count for _, count in of_rule) else None)
        for rule, of_rule in by_rule.items()
    ]


def _arrived(snapshots: Sequence[GradientSnapshot]) -> list[list[int]]:
    """Return in which order the gradients of an update came; nothing where its passes differ in what they reach."""
    reached = {frozenset(snapshot.done.tensors) for snapshot in snapshots}
    return snapshots[-1].arrived if len(reached) == 1 else []


def _decided(severity: int, cause: Cause, step: int) -> StepDecision:
    if severity < RAISE:
        return StepDecision(skip=True, cause=cause)
    return StepDecision(error=cause.error(step), cause=cause)
