"""The decision of `nan-trap`: taken right before the update, reported by what was seen after backward."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Rule
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.accumulated_rules import GradientSnapshot
from gradsurgeon.runtime.activation_flags import Flag
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.final_gradients import FinalGradients
from gradsurgeon.runtime.measure import as_dict, nonfinite, nonfinite_of_each
from gradsurgeon.runtime.nonfinite_report import GradientReport, activation_report, threshold_report
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.runtime.ranks import Cause
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.step_decision import FINE, OVERFLOWED, RAISE, SKIP, StepDecision
from gradsurgeon.runtime.trap_evidence import GradientEvidence, uncounted
from gradsurgeon.runtime.trap_history import TrapHistory, Trip

_OVERFLOW = (
    "step {step}: all ranks skip the step, because the GradScaler of rank {rank} does: the scaled gradients "
    "overflowed there and not everywhere, so that its scale differs from that of the others from now on"
)

SCALER_SKIP = "the GradScaler skipped step {step}: the scaled gradients overflowed"

_REPAIRED_SHOWN = 3


class NanTraps:
    """All `nan-trap` rules of a session."""

    def __init__(self, context: Context, agreement: RankAgreement) -> None:
        self._context = context
        self._agreement = agreement
        self._histories: defaultdict[StepCounter, TrapHistory] = defaultdict(TrapHistory)
        # What was seen after each backward pass of the current step.
        self._snapshots: defaultdict[StepCounter, list[GradientSnapshot]] = defaultdict(list)

    def add_snapshot(self, counter: StepCounter, snapshot: GradientSnapshot) -> None:
        if self._context.program.traps:
            self._snapshots[counter].append(snapshot)

    def done(self, counter: StepCounter) -> None:
        self._snapshots.pop(counter, None)

    def decide(self, counter: StepCounter, gradients: FinalGradients) -> StepDecision:
        """Judge the gradients that the optimizer is about to consume, before rules at `step` edit them.

        Reads the device once, and again only for a report.
        """
        self._histories[counter].scaler_skips = 0
        trips = [
            *self._judge_gradients(counter, gradients),
            *self._judge_thresholds(counter, gradients),
        ]
        return self._conclude(counter, [*trips, *self._judge_activations(counter)])

    def decide_edited(self, counter: StepCounter, edited: set[int]) -> StepDecision:
        """Judge gradients once more that rules at `step` may have made non-finite."""
        context, due_rules = self._context, self._context.due_rules(counter)
        gradients = context.parameters.grads(sorted(edited.intersection(due_rules.trapped)))
        doubtful = nonfinite(measure.norms(*gradients))
        bad = measure.counts(dict(zip(*context.parameters.grads(doubtful), strict=True)))
        order = tuple(context.parameters.grads(due_rules.trapped)[0])
        moment = "right before the update, and finite before the rules at `step`"
        trips = [
            self._histories[counter].trip(
                bound_rule.rule,
                counter.step,
                GradientReport(moment, order, bad, {}).finding(context.program.names),
            )
            for bound_rule in due_rules.traps
            if not bad.keys().isdisjoint(bound_rule.tensors)
        ]
        return self._conclude(counter, trips)

    def measure(self, counter: StepCounter, gradients: FinalGradients) -> None:
        """Take part in what other ranks measure, and make nothing of it."""
        self._judge_gradients(counter, gradients)
        self._judge_thresholds(counter, gradients)

    def rest(self, counter: StepCounter) -> StepDecision:
        """Judge nothing, and do what other ranks have decided, who may wait for this one."""
        return self._conclude(counter, [])

    def skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Note a step that a scaler has skipped, and tell an overflow from a NaN that never ends.

        Args:
            counter: that of the optimizer.
            scale: of the scaler.

        Raises:
            NonFiniteGradientError: too many in a row, or the scale has come down to nothing.
        """
        trips = [] if self._context.paused else self._judge_skip_of_scaler(counter, scale)
        decision = self._conclude(counter, trips, floor=OVERFLOWED)
        if decision.error is not None:
            raise decision.error

    def _judge_gradients(self, counter: StepCounter, gradients: FinalGradients) -> list[Trip]:
        tensors = gradients.having(self._context.due_rules(counter).trapped)
        if not tensors:
            return []
        snapshots = self._snapshots[counter]
        last = snapshots[-1] if snapshots else None
        # On the host the look has been exact; on a device its norms come along with those of now.
        unread = last.norms if last is not None and last.counts is None else ()
        norms = gradients.norms_handed_over(tensors)
        before, doubtful = nonfinite_of_each(unread, norms)
        clean = not (before or doubtful or (last is not None and last.counts))
        fired = self._fired(counter, tensors)
        if clean:
            for bound_rule in fired:
                self._histories[counter].clear(bound_rule.rule)
            return []
        bad = measure.counts(dict(zip(doubtful, gradients.of(doubtful), strict=True)))
        return self._judge(fired, counter, GradientEvidence(snapshots, tensors, bad, norms))

    def _fired(self, counter: StepCounter, tensors: Sequence[int]) -> list[BoundRule]:
        """Count the traps of this step that have a gradient to judge, and return them."""
        due_rules = self._context.due_rules(counter)
        fired = list(due_rules.traps)
        if len(tensors) < len(due_rules.trapped):
            fired = [
                bound_rule
                for bound_rule in fired
                if not set(bound_rule.tensors).isdisjoint(tensors)
            ]
        for bound_rule in fired:
            self._context.event_log.fired(bound_rule.rule.id, counter.step)
        return fired

    def _judge_thresholds(self, counter: StepCounter, gradients: FinalGradients) -> list[Trip]:
        """Judge by any statistic. Reads the device once per rule, and again only for a report."""
        context, history, trips = self._context, self._histories[counter], []
        for bound_rule in context.due_rules(counter).thresholds:
            tensors, decision = gradients.having(bound_rule.tensors), bound_rule.decision
            if not tensors or decision is None:
                continue
            context.event_log.fired(bound_rule.rule.id, counter.step)
            values = gradients.statistics(decision.statistic, tensors)
            tripped = decision.trips(values).tolist()
            if any(tripped):
                names = [context.program.names[tensor] for tensor in tensors]
                finding = threshold_report(decision.statistic, names, values.tolist(), tripped)
                trips.append(history.trip(bound_rule.rule, counter.step, finding))
            else:
                history.clear(bound_rule.rule)
        return trips

    def _judge_activations(self, counter: StepCounter) -> list[Trip]:
        by_rule: defaultdict[str, list[tuple[Flag, int]]] = defaultdict(list)
        for flag, count in self._context.flags.take(counter, self._context.counters.common):
            by_rule[flag.rule.id].append((flag, count))
        history, trips = self._histories[counter], []
        for flags in by_rule.values():
            rule = flags[0][0].rule
            if any(count for _, count in flags):
                trips.append(history.trip(rule, counter.step, activation_report(flags)))
            else:
                history.clear(rule)
        return trips

    def _judge_skip_of_scaler(self, counter: StepCounter, scale: Tensor) -> list[Trip]:
        """Judge a step that a scaler has skipped: an overflow ends, a NaN does not."""
        context, history = self._context, self._histories[counter]
        history.scaler_skips += 1
        context.event_log.emit(
            "scaler-skip", SCALER_SKIP.format(step=counter.step), step=counter.step
        )
        low = float(scale) < 1.0
        due_rules = context.due_rules(counter)
        stuck = [
            bound_rule for bound_rule in due_rules.traps if low or history.is_stuck(bound_rule.rule)
        ]
        if not stuck or context.mode == "observe":
            return []
        # A scaler looks before the script can repair or clip, and so must the trap.
        snapshots = self._snapshots[counter]
        seen = (
            snapshots[-1].norms
            if snapshots
            else measure.norms(*context.parameters.grads(due_rules.trapped))
        )
        norms = as_dict(seen)
        bad = {tensor: uncounted(norm) for tensor, norm in norms.items() if not math.isfinite(norm)}
        why = "its scale is below 1" if low else f"{history.scaler_skips} steps in a row"
        why = f"the GradScaler keeps skipping ({why}): "
        # A skip for what a trap does not watch says nothing of it: its row goes on.
        guilty = [
            bound_rule for bound_rule in stuck if not bad.keys().isdisjoint(bound_rule.tensors)
        ]
        for bound_rule in guilty:
            history.give_up(bound_rule.rule)
        evidence = GradientEvidence(snapshots, list(norms), bad)
        trips = self._judge(guilty, counter, evidence)
        return [trip.because(why) for trip in trips]

    def _judge(
        self, bound_rules: Iterable[BoundRule], counter: StepCounter, evidence: GradientEvidence
    ) -> list[Trip]:
        history, trips = self._histories[counter], []
        for bound_rule in bound_rules:
            if any(tensor in evidence.now for tensor in bound_rule.tensors):
                finding = evidence.border().finding(self._context.program.names)
                trip = history.trip(bound_rule.rule, counter.step, finding, guilty=evidence.guilty)
                trips.append(trip)
                continue
            history.clear(bound_rule.rule)
            repaired = [tensor for tensor in bound_rule.tensors if tensor in evidence.repaired]
            self._mention_repair(bound_rule.rule, counter.step, repaired)
        return trips

    def _conclude(
        self, counter: StepCounter, trips: Sequence[Trip], *, floor: int = FINE
    ) -> StepDecision:
        """Report what this rank has seen, and return what all ranks do that make this update together.

        A collective where they meet. ``floor`` is how bad it is at the least.
        """
        severity = max([floor, *(trip.severity for trip in trips)])
        meeting = self._agreement.meet(counter, severity, guilty=any(trip.guilty for trip in trips))
        decision = self._report(trips, meeting.guilty)
        if not meeting.groups or meeting.severity == FINE:
            return decision
        rank = _dist.rank()
        overflow = Cause(rank, "", "", _OVERFLOW.format(step=counter.step, rank=rank))
        cause = meeting.hear(decision.cause or overflow)
        if meeting.severity > severity:
            return self._follow(counter.step, meeting.severity, cause)
        return decision

    def _follow(self, step: int, severity: int, cause: Cause) -> StepDecision:
        where: dict[str, Any] = {"rule": cause.rule, "step": step, "name": cause.name}
        head = f"step {step}: rank {cause.rank} trapped, and all ranks"
        if severity < RAISE:
            text = f"{head} skip the step: {cause.text}" if cause.rule else cause.text
            self._context.event_log.emit("skipped-step", text, **where)
            return StepDecision(skip=True, cause=cause)
        text = f"{head} stop: {cause.text}"
        self._context.event_log.emit("trap", text, **where, raised=True)
        return StepDecision(error=replace(cause, text=text).error(step), cause=cause)

    def _report(self, trips: Sequence[Trip], ranks: tuple[int, ...]) -> StepDecision:
        """Say what traps have found, and return what becomes of the step.

        ``ranks`` are those that contributed what is not finite to an average.
        """
        words = [self._tell(trip, ranks) for trip in trips]
        # What stops a step is what the other ranks have to hear of.
        worst = max(trips, key=lambda trip: trip.severity, default=None)
        if worst is None or worst.severity == FINE or self._context.mode == "observe":
            return StepDecision()
        cause = words[trips.index(worst)]
        if worst.severity == SKIP:
            return StepDecision(skip=True, cause=cause)
        return StepDecision(error=cause.error(worst.step), cause=cause)

    def _tell(self, trip: Trip, ranks: tuple[int, ...]) -> Cause:
        context, rule, step, acts = (
            self._context,
            trip.rule.id,
            trip.step,
            self._context.mode == "act",
        )
        finding = trip.finding.caused_by(ranks)
        head = f"{context.place(step, rule)}: {finding.head}"
        text = "\n".join([head, trip.outcome(context.mode), *finding.lines])
        context.event_log.altered(rule, torch.ones((), dtype=torch.bool))
        where: dict[str, Any] = {"rule": rule, "step": step, "name": finding.name}
        warn, raised = acts and trip.then == "warn", acts and trip.then == "raise"
        context.event_log.emit("trap", text, **where, warn=warn, raised=raised)
        if acts and trip.severity == SKIP:
            message = f"step {step} skipped: no weight and no optimizer state was touched"
            context.event_log.emit("skipped-step", message, **where)
        rank = finding.ranks[0] if finding.ranks else _dist.rank()
        return Cause(rank, rule, finding.name, text)

    def _mention_repair(self, rule: Rule, step: int, repaired: Sequence[int]) -> None:
        if not repaired:
            return
        names = [self._context.program.names[tensor] for tensor in repaired]
        more = ", ..." if len(names) > _REPAIRED_SHOWN else ""
        text = (
            f"{len(names)} gradients were non-finite after backward and finite at the update "
            f"({', '.join(names[:_REPAIRED_SHOWN])}{more}): repaired in between, no trap"
        )
        self._context.event_log.emit("notice", text, rule=rule.id, step=step, name=names[0])
