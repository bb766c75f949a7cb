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
from gradsurgeon.errors import NonFiniteGradientError
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.agenda import Lane
from gradsurgeon.runtime.agreement import Agreement
from gradsurgeon.runtime.border import Border, finding_of_flags, finding_of_values
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.deferred import EVERY, Case, can_defer, judge
from gradsurgeon.runtime.evidence import Evidence, uncounted
from gradsurgeon.runtime.final import Finals
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.history import TrapHistory, Trip
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import as_dict, suspects, suspects_of
from gradsurgeon.runtime.notices import tell_of_foreign_scale
from gradsurgeon.runtime.ranks import Word
from gradsurgeon.runtime.ring import Ring
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.verdict import FINE, OVERFLOWED, RAISE, SKIP, Verdict

_OVERFLOW = (
    "step {step}: all ranks skip the step, because the GradScaler of rank {rank} does: the scaled gradients "
    "overflowed there and not everywhere, so that its scale differs from that of the others from now on"
)

SCALER_SKIP = "the GradScaler skipped step {step}: the scaled gradients overflowed"

_REPAIRED_SHOWN = 3


class Traps:
    """All `nan-trap` rules of a session."""

    def __init__(self, state: State, agreement: Agreement) -> None:
        self._state = state
        self._agreement = agreement
        self._histories: defaultdict[Clock, TrapHistory] = defaultdict(TrapHistory)
        # What was seen after each backward pass of the current step.
        self._looks: defaultdict[Clock, list[Look]] = defaultdict(list)
        # The steps that devices have decided on, and how many there have been.
        self._deferred: Ring[Case] = Ring(self._report_deferred)
        self._deferred_steps = 0
        # What one of them has led to, and a later step has to raise.
        self._late_error: NonFiniteGradientError | None = None

    def saw(self, clock: Clock, look: Look) -> None:
        if self._state.program.traps:
            self._looks[clock].append(look)

    def done(self, clock: Clock) -> None:
        self._looks.pop(clock, None)

    def decide(self, clock: Clock, finals: Finals, *, flaggable: bool = False) -> Verdict:
        """Judge the gradients that the optimizer is about to consume, before rules at `step` edit them.

        Reads the device once, and again only for a report; not at all where the device decides.

        Args:
            clock: of the optimizer.
            finals: its gradients.
            flaggable: a flag on the device can tell it to skip.
        """
        if flaggable and (verdict := self._defer(clock, finals)) is not None:
            return verdict
        if (error := self._late_error_due(wait=True)) is not None:
            return self._conclude(clock, [], error=error)
        self._histories[clock].scaler_skips = 0
        trips = [*self._judge_gradients(clock, finals), *self._judge_thresholds(clock, finals)]
        return self._conclude(clock, [*trips, *self._judge_activations(clock)])

    def decide_edited(self, clock: Clock, edited: set[int]) -> Verdict:
        """Judge gradients once more that rules at `step` may have made non-finite."""
        state, agenda = self._state, self._state.agenda(clock)
        gradients = state.targets.grads(sorted(edited.intersection(agenda.trapped)))
        doubtful = suspects(measure.norms(*gradients))
        bad = measure.counts(dict(zip(*state.targets.grads(doubtful), strict=True)))
        order = tuple(state.targets.grads(agenda.trapped)[0])
        moment = "right before the update, and finite before the rules at `step`"
        trips = [
            self._histories[clock].trip(
                lane.rule, clock.step, Border(moment, order, bad, {}).finding(state.program.names)
            )
            for lane in agenda.traps
            if not bad.keys().isdisjoint(lane.tensors)
        ]
        return self._conclude(clock, trips)

    def measure(self, clock: Clock, finals: Finals) -> None:
        """Take part in what other ranks measure, and make nothing of it."""
        self._judge_gradients(clock, finals)
        self._judge_thresholds(clock, finals)

    def rest(self, clock: Clock) -> Verdict:
        """Judge nothing, and do what other ranks have decided, who may wait for this one."""
        return self._conclude(clock, [])

    def settle(self, *, wait: bool = True) -> None:
        """Report what devices have decided; without waiting, what they have told so far."""
        if wait:
            self._deferred.settle()
        else:
            self._deferred.send()

    def scaled_away(self, clock: Clock, scale: Tensor) -> None:
        """Note a step that a scaler has skipped, and tell an overflow from a NaN that never ends.

        Args:
            clock: that of the optimizer.
            scale: of the scaler.

        Raises:
            NonFiniteGradientError: too many in a row, or the scale has come down to nothing.
        """
        trips = [] if self._state.paused else self._judge_skip_of_scaler(clock, scale)
        verdict = self._conclude(clock, trips, floor=OVERFLOWED)
        if verdict.error is not None:
            raise verdict.error

    def _defer(self, clock: Clock, finals: Finals) -> Verdict | None:
        """Leave the decision to the device and report later; ``None`` where the host has to decide."""
        state, agenda = self._state, self._state.agenda(clock)
        # Whether to skip may be for other ranks to say as well.
        if not agenda.traps or agenda.thresholds or self._agreement.common(clock):
            return None
        tensors = finals.having(agenda.trapped)
        grads, looks = finals.of(tensors), tuple(self._looks[clock])
        if not can_defer(state, agenda, grads, looks):
            return None
        if (error := self._late_error_due()) is not None:
            return Verdict(error=error)
        self._histories[clock].scaler_skips = 0
        case = Case(clock, clock.step, self._fired(clock, tensors), tuple(tensors), looks)
        flag, numbers = judge(case, grads)
        self._deferred.put(case, numbers)
        self._deferred_steps += 1
        return Verdict(flag=flag)

    def _judge_gradients(self, clock: Clock, finals: Finals) -> list[Trip]:
        state, agenda = self._state, self._state.agenda(clock)
        tensors = finals.having(agenda.trapped)
        if not tensors:
            return []
        looks = self._looks[clock]
        last = looks[-1] if looks else None
        # On the host the look has been exact; on a device its norms come along with those of now.
        unread = last.norms if last is not None and last.counts is None else ()
        norms = finals.norms_handed_over(tensors)
        before, doubtful = suspects_of(unread, norms)
        clean = not (before or doubtful or (last is not None and last.counts))
        if clean and last is not None and state.scaling.scale is None:
            tell_of_foreign_scale(state, clock, last.norms, norms)
        fired = self._fired(clock, tensors)
        if clean:
            for lane in fired:
                self._histories[clock].clear(lane.rule)
            return []
        bad = measure.counts(dict(zip(doubtful, finals.of(doubtful), strict=True)))
        return self._judge(fired, clock, clock.step, Evidence(looks, tensors, bad, norms))

    def _fired(self, clock: Clock, tensors: Sequence[int]) -> list[Lane]:
        """Count the traps of this step that have a gradient to judge, and return them."""
        agenda = self._state.agenda(clock)
        fired = list(agenda.traps)
        if len(tensors) < len(agenda.trapped):
            fired = [lane for lane in fired if not set(lane.tensors).isdisjoint(tensors)]
        for lane in fired:
            self._state.journal.fired(lane.rule.id, clock.step)
        return fired

    def _judge_thresholds(self, clock: Clock, finals: Finals) -> list[Trip]:
        """Judge by any statistic. Reads the device once per rule, and again only for a report."""
        state, history, trips = self._state, self._histories[clock], []
        for lane in state.agenda(clock).thresholds:
            tensors, decision = finals.having(lane.tensors), lane.decision
            if not tensors or decision is None:
                continue
            state.journal.fired(lane.rule.id, clock.step)
            values = finals.statistics(decision.statistic, tensors)
            tripped = decision.trips(values).tolist()
            if any(tripped):
                names = [state.program.names[tensor] for tensor in tensors]
                finding = finding_of_values(decision.statistic, names, values.tolist(), tripped)
                trips.append(history.trip(lane.rule, clock.step, finding))
            else:
                history.clear(lane.rule)
        return trips

    def _judge_activations(self, clock: Clock) -> list[Trip]:
        by_rule: defaultdict[str, list[tuple[Flag, int]]] = defaultdict(list)
        for flag, count in self._state.flags.take(clock, self._state.clocks.common):
            by_rule[flag.rule.id].append((flag, count))
        history, trips = self._histories[clock], []
        for flags in by_rule.values():
            rule = flags[0][0].rule
            if any(count for _, count in flags):
                trips.append(history.trip(rule, clock.step, finding_of_flags(flags)))
            else:
                history.clear(rule)
        return trips

    def _judge_skip_of_scaler(self, clock: Clock, scale: Tensor) -> list[Trip]:
        """Judge a step that a scaler has skipped: an overflow ends, a NaN does not."""
        state, history = self._state, self._histories[clock]
        history.scaler_skips += 1
        state.journal.emit("scaler-skip", SCALER_SKIP.format(step=clock.step), step=clock.step)
        low = float(scale) < 1.0
        agenda = state.agenda(clock)
        stuck = [lane for lane in agenda.traps if low or history.is_stuck(lane.rule)]
        if not stuck or state.mode == "observe":
            return []
        # A scaler looks before the script can repair or clip, and so must the trap.
        looks = self._looks[clock]
        seen = looks[-1].norms if looks else measure.norms(*state.targets.grads(agenda.trapped))
        norms = as_dict(seen)
        bad = {tensor: uncounted(norm) for tensor, norm in norms.items() if not math.isfinite(norm)}
        why = "its scale is below 1" if low else f"{history.scaler_skips} steps in a row"
        why = f"the GradScaler keeps skipping ({why}): "
        trips = self._judge(stuck, clock, clock.step, Evidence(looks, list(norms), bad))
        return [trip.given_up(why) for trip in trips]

    def _judge(
        self, lanes: Iterable[Lane], clock: Clock, step: int, evidence: Evidence
    ) -> list[Trip]:
        history, trips = self._histories[clock], []
        for lane in lanes:
            if any(tensor in evidence.now for tensor in lane.tensors):
                finding = evidence.border().finding(self._state.program.names)
                trips.append(history.trip(lane.rule, step, finding, guilty=evidence.guilty))
                continue
            history.clear(lane.rule)
            repaired = [tensor for tensor in lane.tensors if tensor in evidence.repaired]
            self._mention_repair(lane.rule, step, repaired)
        return trips

    def _conclude(
        self,
        clock: Clock,
        trips: Sequence[Trip],
        *,
        error: NonFiniteGradientError | None = None,
        floor: int = FINE,
    ) -> Verdict:
        """Report what this rank has seen, and return what all ranks do that make this update together.

        A collective where they meet. ``floor`` is how bad it is at the least, and ``error`` what an
        earlier step has led to.
        """
        if error is not None:
            floor = RAISE
        severity = max([floor, *(trip.severity for trip in trips)])
        meeting = self._agreement.meet(clock, severity, guilty=any(trip.guilty for trip in trips))
        verdict = self._report(trips, meeting.guilty)
        if error is not None:
            word = Word(error.rank, error.rule, error.name or "", str(error))
            verdict = Verdict(error=error, word=word)
        if not meeting.groups or meeting.severity == FINE:
            return verdict
        rank = _dist.rank()
        overflow = Word(rank, "", "", _OVERFLOW.format(step=clock.step, rank=rank))
        word = meeting.hear(verdict.word or overflow)
        if meeting.severity > severity:
            return self._follow(clock.step, meeting.severity, word)
        return verdict

    def _follow(self, step: int, severity: int, word: Word) -> Verdict:
        where: dict[str, Any] = {"rule": word.rule, "step": step, "name": word.name}
        head = f"step {step}: rank {word.rank} trapped, and all ranks"
        if severity < RAISE:
            text = f"{head} skip the step: {word.text}" if word.rule else word.text
            self._state.journal.emit("skipped-step", text, **where)
            return Verdict(skip=True, word=word)
        text = f"{head} stop: {word.text}"
        self._state.journal.emit("trap", text, **where, raised=True)
        return Verdict(error=replace(word, text=text).error(step), word=word)

    def _report(self, trips: Sequence[Trip], ranks: tuple[int, ...] = ()) -> Verdict:
        """Say what traps have found, and return what becomes of the step.

        ``ranks`` are those that contributed what is not finite to an average.
        """
        words = [self._tell(trip, ranks) for trip in trips]
        # What stops a step is what the other ranks have to hear of.
        worst = max(trips, key=lambda trip: trip.severity, default=None)
        if worst is None or worst.severity == FINE or self._state.mode == "observe":
            return Verdict()
        word = words[trips.index(worst)]
        if worst.severity == SKIP:
            return Verdict(skip=True, word=word)
        return Verdict(error=word.error(worst.step), word=word)

    def _tell(self, trip: Trip, ranks: tuple[int, ...]) -> Word:
        state, rule, step, acts = self._state, trip.rule.id, trip.step, self._state.mode == "act"
        finding = trip.finding.caused_by(ranks)
        head = f"{state.place(step, rule)}: {finding.head}"
        text = "\n".join([head, trip.outcome(state.mode), *finding.lines])
        state.journal.altered(rule, torch.ones((), dtype=torch.bool))
        where: dict[str, Any] = {"rule": rule, "step": step, "name": finding.name}
        warn, raised = acts and trip.then == "warn", acts and trip.then == "raise"
        state.journal.emit("trap", text, **where, warn=warn, raised=raised)
        if acts and trip.severity == SKIP:
            message = f"step {step} skipped: no weight and no optimizer state was touched"
            state.journal.emit("skipped-step", message, **where)
        rank = finding.ranks[0] if finding.ranks else _dist.rank()
        return Word(rank, rule, finding.name, text)

    def _late_error_due(self, *, wait: bool = False) -> NonFiniteGradientError | None:
        if wait or self._deferred_steps % EVERY == 0:
            self.settle(wait=wait)
        self._deferred.collect()
        error, self._late_error = self._late_error, None
        return error

    def _report_deferred(self, rows: Sequence[tuple[Case, Tensor]]) -> None:
        for case, numbers in rows:
            trips = self._judge(case.lanes, case.clock, case.step, case.evidence(numbers.tolist()))
            # It comes at another moment on each rank, which can only speak for itself.
            self._late_error = self._late_error or self._report(trips).error

    def _mention_repair(self, rule: Rule, step: int, repaired: Sequence[int]) -> None:
        if not repaired:
            return
        names = [self._state.program.names[tensor] for tensor in repaired]
        more = ", ..." if len(names) > _REPAIRED_SHOWN else ""
        text = (
            f"{len(names)} gradients were non-finite after backward and finite at the update "
            f"({', '.join(names[:_REPAIRED_SHOWN])}{more}): repaired in between, no trap"
        )
        self._state.journal.emit("notice", text, rule=rule.id, step=step, name=names[0])
