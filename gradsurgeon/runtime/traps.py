"""The decision of traps on an update: made right before it, with reports on gradients seen since backward."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from gradsurgeon.actions import NEVER, Decision
from gradsurgeon.distributed.ranks import OVERFLOWED
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.errors import shorten_names
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.conclusions import Conclusions, Finding, Look, StepContext, Trip
from gradsurgeon.runtime.context import Context, Flag
from gradsurgeon.runtime.due_rules import BoundRule, StepCounter
from gradsurgeon.runtime.rank_agreement import ALONE, Heard, decides
from gradsurgeon.runtime.spike_traps import SpikeTraps
from gradsurgeon.runtime.training_events import (
    GOES_ON,
    BackwardPass,
    GradientSnapshot,
    StepDecision,
)
from gradsurgeon.runtime.trap_report import (
    GradientEvidence,
    activation_report,
    gradient_report,
    threshold_report,
    uncounted,
)
from gradsurgeon.tensors import _dist, measure
from gradsurgeon.tensors.measure import Norms

_OVERFLOW = (
    "step {step}: all ranks skip the step, because the scaled gradients of rank {rank} overflowed and those of other ranks did "
    "not: its GradScaler skips alone, so its scale differs from the others from now on"
)
_REPAIRED = "{number} gradients were non-finite after backward and finite at the update ({names}): repaired, no trap"
SCALER_SKIP = "the GradScaler skipped step {step}: the scaled gradients were not finite"
_NO_OVERFLOW = "the GradScaler skips a step that no loss scale can mend"


class Traps:
    def __init__(self, context: Context, kept: KeptCalls, spikes: SpikeTraps) -> None:
        self._context = context
        self._names = context.program.names
        self._spikes = spikes
        self._conclusions = Conclusions(context, kept)
        # What backward passes left, of parameters whose update has not come yet. Its counter may come later than the pass.
        self._snapshots: list[GradientSnapshot] = []

    @property
    def keeps_calls(self) -> bool:
        """Whether the next trip of some rule is diagnosed."""
        return bool(self._conclusions.diagnosis.pending)

    def add_snapshots(self, taken: Iterable[GradientSnapshot]) -> None:
        for snapshot in taken:
            if self._context.program.traps or snapshot.reported:
                members = set(snapshot.members)
                # A step of many micro-batches must not keep the graph of each.
                self._snapshots = [
                    earlier if members.isdisjoint(earlier.members) else earlier.without_graph()
                    for earlier in self._snapshots
                ]
                self._snapshots.append(snapshot)

    def done(self, counter: StepCounter) -> None:
        updated = set(counter.indices)
        waiting = []
        for snapshot in self._snapshots:
            members = tuple(index for index in snapshot.members if index not in updated)
            if members:
                waiting.append(snapshot.among(members))
        self._snapshots = waiting

    def _snapshots_of(self, counter: StepCounter) -> list[GradientSnapshot]:
        """Return what the backward passes of an update left, the earliest first."""
        snapshots = [snapshot.among(counter.indices) for snapshot in self._snapshots]
        return [snapshot for snapshot in snapshots if snapshot.members]

    def objections(self, done: BackwardPass) -> list[Objection]:
        """Return this rank's objections to the update after a pass. Reads the device once, and again for a report."""
        context, rank, found = self._context, _dist.rank(), []
        for counter in context.counters.among(done.indices):
            concerns = self._names[counter.indices[0]]
            deciding = [one for one in context.due_rules(counter).traps if decides(one.rule)]
            snapshots = self._snapshots_of(counter) if deciding else []
            norms = snapshots[-1].norms if snapshots else ()
            (doubtful,) = measure.nonfinite(norms)
            if doubtful and done.scale is not None:
                text = _OVERFLOW.format(step=counter.step, rank=rank)
                found.append(Objection(rank, "", OVERFLOWED, concerns, "", text))
                continue
            bad = measure.counts(dict(zip(*context.parameters.grads(doubtful), strict=True)))
            evidence = GradientEvidence(snapshots, (), bad, norms)
            flagged = self._judge_activations(counter, final=False)
            for rule, report in [*self._findings(deciding, evidence), *flagged]:
                decision = context.decisions[rule]
                if report is None or not decides(decision):
                    continue
                trip = Trip(rule, decision, counter.trips.get(rule, 0) + 1, report)
                text = "\n".join([self._conclusions.head(counter.step, trip), *report.lines])
                where = rule, trip.severity, concerns, report.name
                found.append(Objection(rank, *where, text, report.guilty))
        return found

    def decide(self, update: StepContext) -> StepDecision:
        """Judge the gradients that the optimizer is about to consume. Reads the device once, and again for a report."""
        update.counter.scaler_skips = 0
        looks = self._look_at_gradients(update)
        if update.due.spike_traps:
            looks += self._spikes.looks(update, partial(self._arrived, update.counter))
        if update.due.thresholds:
            looks += self._look_at_statistics(update)
        findings: list[Finding] = []
        if looks:
            # The snapshots after backward reach the host together with the current numbers.
            tripped = measure.nonfinite(*[one for look in looks for one in look.numbers])
            for look in looks:
                count = len(look.numbers)
                findings += look.findings(*tripped[:count])
                del tripped[:count]
        findings += self._judge_activations(update.counter, final=True)
        return self._conclude(update, findings)

    def decide_edited(self, update: StepContext, edited: set[int]) -> StepDecision:
        """Judge gradients again that rules at `step` edited, alike on all ranks. A collective for sharded gradients."""
        context, trapped = self._context, update.due.trapped
        norms = measure.norms(*context.parameters.grads(sorted(edited.intersection(trapped))))
        (doubtful,) = measure.nonfinite(norms)
        suspects = dict(zip(*context.parameters.grads(doubtful), strict=True))
        bad, numbers = measure.counts(suspects), measure.as_dict(norms) if doubtful else {}
        divided = [index for index, grad in suspects.items() if _dist.is_sharded(grad)]
        bad |= {index: uncounted(numbers[index]) for index in divided if index not in bad}
        order, _ = context.parameters.grads(trapped)
        moment = "right before the update, and finite before the rules at `step`"
        findings = [
            (bound.rule.id, gradient_report(self._names, moment, order, bad, {}))
            for bound in update.due.traps
            if not bad.keys().isdisjoint(bound.indices)
        ]
        return self._conclude(update, findings, known=not context.ranks.own(bad))

    def rest(self, counter: StepCounter, heard: Heard, *, moved: bool) -> StepDecision:
        """Judge nothing, and follow the other ranks."""
        return self._conclusions.of(counter, [], heard, self._scale(counter), moved=moved)

    def skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Note a step that a scaler skipped; raise if the cause is a persistent NaN rather than an overflow."""
        findings = self._judge_skip_of_scaler(counter, scale)
        decision = self._conclusions.of(counter, findings, ALONE, self._scale(counter))
        if decision.error is not None:
            raise decision.error()

    def _look_at_gradients(self, update: StepContext) -> list[Look]:
        indices = update.gradients.having(update.due.trapped)
        if not indices:
            return []
        norms = update.gradients.take_norms(indices)
        snapshots = self._snapshots_of(update.counter)
        before = snapshots[-1].norms if snapshots else ()
        return [Look((before, norms), partial(self._nonfinite, update, indices, norms))]

    def _nonfinite(
        self,
        update: StepContext,
        indices: Sequence[int],
        norms: Norms,
        before: Sequence[int],
        doubtful: Sequence[int],
    ) -> list[Finding]:
        """Return the findings of traps, given the tensors with a doubtful norm after backward and now."""
        event_log, gradients = self._context.event_log, update.gradients
        there = set(indices)
        fired = [one for one in update.due.traps if not there.isdisjoint(one.indices)]
        for bound in fired:
            event_log.count_fired(bound.rule.id, update.step)
        if not (before or doubtful):
            return [(bound.rule.id, None) for bound in fired]
        bad = measure.counts(dict(zip(doubtful, gradients.of(doubtful), strict=True)))
        snapshots = self._snapshots_of(update.counter)
        divided = frozenset(t for t in indices if _dist.is_sharded(gradients[t]))
        evidence = GradientEvidence(snapshots, indices, bad, norms, divided)
        objecting = {one.rule for one in update.heard.objections}
        for bound in fired:
            rule = bound.rule.id
            names = [self._names[index] for index in bound.indices if index in evidence.repaired]
            if names and rule not in objecting and bad.keys().isdisjoint(bound.indices):
                text = _REPAIRED.format(number=len(names), names=shorten_names(names))
                event_log.emit("notice", text, rule=rule, step=update.step, name=names[0])
        return self._findings(fired, evidence)

    def _look_at_statistics(self, update: StepContext) -> Iterator[Look]:
        for bound in update.due.thresholds:
            if indices := update.gradients.having(bound.indices):
                rule = bound.rule.id
                self._context.event_log.count_fired(rule, update.step)
                decision = self._context.decisions[rule]
                assert isinstance(decision, Decision)  # noqa: S101 # it has a threshold
                values = update.gradients.statistics(decision.statistic, indices)
                # A non-finite number marks a tensor that trips.
                flags = values.new_zeros(len(values)).masked_fill(decision.trips(values), math.inf)
                told = partial(self._over_threshold, rule, decision.statistic, indices, values)
                yield Look((((tuple(indices), flags),),), told)

    def _over_threshold(
        self, rule: str, stat: str, indices: Sequence[int], values: Tensor, tripped: Sequence[int]
    ) -> list[Finding]:
        if not tripped:
            return [(rule, None)]
        names = [self._names[index] for index in indices]
        flags = [index in tripped for index in indices]
        return [(rule, threshold_report(stat, names, values.tolist(), flags))]

    def _judge_skip_of_scaler(self, counter: StepCounter, scale: Tensor) -> list[Finding]:
        context, event_log, step = self._context, self._context.event_log, counter.step
        counter.scaler_skips += 1
        skips = counter.scaler_skips
        low = float(scale) < 1.0
        event_log.emit("scaler-skip", SCALER_SKIP.format(step=step), step=step)
        evidence = self._evidence_of_skip(counter)
        # A skip caused by other tensors says nothing about a trap: its row goes on.
        due = [bound for bound in context.due_rules(counter).traps if evidence.concerns(bound)]
        if not due or context.mode == "observe":
            return []
        limits = {rule: decision.patience for rule, decision in context.decisions.items()}
        stuck = [bound for bound in due if low or skips >= limits[bound.rule.id]]
        # Overflows come in rows until the scale fits: not each is worth running the step again.
        if not stuck and skips == 1:
            self._diagnose_skip(counter, due[0].rule.id, evidence)
        for bound in stuck:
            # This trip exceeds `give_up_after`, and so does each later trip until the trap finds nothing.
            rule = bound.rule.id
            event_log.count_fired(rule, step)
            if limits[rule] < NEVER:
                counter.trips[rule] = max(counter.trips.get(rule, 0), limits[rule] - 1)
        why = "its scale is below 1" if low else f"{skips} steps in a row"
        found = self._findings(stuck, evidence, f"the GradScaler keeps skipping ({why}): ")
        goes_on = "the GradScaler skips the update"
        return [(rule, report and replace(report, goes_on=goes_on)) for rule, report in found]

    def _evidence_of_skip(self, counter: StepCounter) -> GradientEvidence:
        # A scaler checks before the script can repair or clip, so the trap must do the same.
        snapshots = self._snapshots_of(counter)
        parameters = self._context.parameters
        seen = snapshots[-1].norms if snapshots else ()
        trapped = self._context.due_rules(counter).trapped
        norms = measure.as_dict(seen or measure.norms_here(*parameters.grads(trapped)))
        bad = {index: uncounted(norm) for index, norm in norms.items() if not math.isfinite(norm)}
        return GradientEvidence(snapshots, list(norms), bad)

    def _diagnose_skip(self, counter: StepCounter, rule: str, evidence: GradientEvidence) -> None:
        """Say once where a NaN of a skipped step was born, if it is no overflow."""
        step, context = counter.step, self._context
        report, scale = evidence.report(self._names), self._scale(counter)
        if (found := self._conclusions.diagnosis.of_skip(step, scale, report)) is not None:
            text = "\n".join([f"{context.place(step, rule)}: {_NO_OVERFLOW}", *found.text()])
            context.event_log.notice_once("no-overflow", text, rule=rule, step=step, warn=True)

    def _findings(
        self, bound_rules: Iterable[BoundRule], evidence: GradientEvidence, why: str = ""
    ) -> list[Finding]:
        names = self._names
        return [
            (bound.rule.id, evidence.report(names, why) if evidence.concerns(bound) else None)
            for bound in bound_rules
        ]

    def _conclude(
        self, update: StepContext, findings: Sequence[Finding], *, known: bool = False
    ) -> StepDecision:
        counter = update.counter
        rows = counter.trips or counter.trips_now
        if update.heard is ALONE and not rows and not any(report for _, report in findings):
            return GOES_ON
        scale = self._scale(counter)
        return self._conclusions.of(
            counter, findings, update.heard, scale, known=known, moved=update.moved
        )

    def _scale(self, counter: StepCounter) -> Tensor | None:
        passes = (snapshot.done for snapshot in self._snapshots_of(counter))
        return next((done.scale for done in passes if done.scale is not None), None)

    def _arrived(self, counter: StepCounter) -> list[list[int]]:
        """Return the order in which the gradients of an update came; nothing if its passes reached different tensors."""
        snapshots = self._snapshots_of(counter)
        reached = {frozenset(snapshot.done.indices) for snapshot in snapshots}
        return snapshots[-1].arrived if len(reached) == 1 else []

    def _judge_activations(self, counter: StepCounter, *, final: bool) -> list[Finding]:
        """Judge the flags of modules and tags; ``final`` if the update is about to take place."""
        if not self._context.program.site_rules:
            return []
        flags, counters = self._context.flags, (counter, self._context.counters.common)
        # Modules that no optimizer owns use the common counter: the next update of any optimizer judges them.
        by_rule: defaultdict[str, list[tuple[Flag, int]]] = defaultdict(list)
        for flag, count in flags.take(counters) if final else flags.raised(counters):
            by_rule[flag.rule.id].append((flag, count))
        return [
            (rule, activation_report(of_rule) if any(count for _, count in of_rule) else None)
            for rule, of_rule in by_rule.items()
        ]
