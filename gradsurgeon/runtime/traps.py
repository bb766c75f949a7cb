"""What traps decide on an update: taken right before it, reported by what was seen after backward."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Decision
from gradsurgeon.distributed.ranks import OVERFLOWED
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.errors import shorten_names
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.activation_flags import Flag
from gradsurgeon.runtime.conclusions import Conclusions
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.gradient_rules import GradientSnapshot
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.nonfinite_report import (
    GradientEvidence,
    activation_report,
    gradient_report,
    threshold_report,
    uncounted,
)
from gradsurgeon.runtime.rank_agreement import ALONE, Heard, decides
from gradsurgeon.runtime.spike_report import spike_report
from gradsurgeon.runtime.spike_traps import SpikeTraps
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.training_events import BackwardPass, StepDecision
from gradsurgeon.runtime.trips import Finding, Rows, Trip
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
SCALER_SKIP = "the GradScaler skipped step {step}: the scaled gradients overflowed"


class Traps:
    def __init__(self, context: Context, kept: KeptCalls, spikes: SpikeTraps) -> None:
        self._context = context
        self._spikes = spikes
        self.rows = Rows()
        self._conclusions = Conclusions(context, kept, self.rows)
        # How often in a row scalers have skipped a step.
        self._scaler_skips: Counter[StepCounter] = Counter()
        # What was seen after each backward pass of the current step.
        self._snapshots: defaultdict[StepCounter, list[GradientSnapshot]] = defaultdict(list)

    @property
    def keeps_calls(self) -> bool:
        """Whether the next trip of some rule is diagnosed."""
        return bool(self._conclusions.diagnosis.pending)

    def add_snapshot(self, counter: StepCounter, snapshot: GradientSnapshot) -> None:
        if self._context.program.traps or self._context.due_rules(counter).reported:
            snapshots = self._snapshots[counter]
            # A step of many micro-batches must not keep the graph of each.
            snapshots[-1:] = [earlier.without_graph() for earlier in snapshots[-1:]]
            snapshots.append(snapshot)

    def done(self, counter: StepCounter) -> None:
        self._snapshots.pop(counter, None)
        self.rows.done(counter)

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
                    counter, Trip(rule, decision, self.rows.of(counter, rule) + 1, report), parts
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
            "\n".join([self._conclusions.head(counter.step, trip), *report.lines]),
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
    ) -> list[Finding]:
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
        findings: list[Finding] = []
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

    def _judge_thresholds(self, counter: StepCounter, gradients: Gradients) -> list[Finding]:
        """Judge by any statistic. Reads the device once per rule, and again only for a report."""
        context = self._context
        findings: list[Finding] = []
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

    def _judge_activations(self, counter: StepCounter) -> list[Finding]:
        return _reported(self._context.flags.take(counter, self._context.counters.common))

    def _flagged(self, counter: StepCounter) -> list[Finding]:
        return _reported(self._context.flags.raised(counter, self._context.counters.common))

    def _judge_skip_of_scaler(self, counter: StepCounter, scale: Tensor) -> list[Finding]:
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
            self.rows.put(counter, rule, max(self.rows.of(counter, rule), patience[rule] - 1))
        why = "its scale is below 1" if low else f"{skips} steps in a row"
        evidence = GradientEvidence(snapshots, list(norms), bad)
        return self._findings(guilty, evidence, f"the GradScaler keeps skipping ({why}): ")

    def _findings(
        self, bound_rules: Iterable[BoundRule], evidence: GradientEvidence, why: str = ""
    ) -> list[Finding]:
        names, bad = self._context.program.names, evidence.now.keys()
        return [
            (bound.rule.id, None if bad.isdisjoint(bound.tensors) else evidence.report(names, why))
            for bound in bound_rules
        ]

    def _conclude(
        self,
        counter: StepCounter,
        findings: Sequence[Finding],
        heard: Heard,
        *,
        known: bool = False,
    ) -> StepDecision:
        passes = [snapshot.done for snapshot in self._snapshots[counter]]
        scale = next((done.scale for done in passes if done.scale is not None), None)
        return self._conclusions.of(counter, findings, heard, scale, known=known)


def _reported(flags: Iterable[tuple[Flag, int]]) -> list[Finding]:
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
