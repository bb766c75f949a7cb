"""The decision of `nan-trap`: taken right before the update, reported by the first look after backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Rule
from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.errors import NonFiniteGradientError
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.agenda import Lane
from gradsurgeon.runtime.agreement import FINE, OVERFLOWED, RAISE, Agreement
from gradsurgeon.runtime.border import Border, Finding
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.deferred import Case, Deferred
from gradsurgeon.runtime.final import Finals
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import suspects, suspects_of
from gradsurgeon.runtime.notices import tell_of_foreign_scale
from gradsurgeon.runtime.ranks import Word
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.verdict import (
    Evidence,
    Seen,
    Trip,
    Verdict,
    Watch,
    certainly_bad,
    finding_of_flags,
    finite,
    is_guilty,
    outcome,
)

_OVERFLOW = (
    "step {step}: all ranks skip the step, because the GradScaler of rank {rank} does: the scaled gradients "
    "overflowed there and not everywhere, so that its scale differs from that of the others from now on"
)

SCALER_SKIP = "the GradScaler skipped step {step}: the scaled gradients overflowed"


class Traps:
    """All `nan-trap` rules of a session."""

    def __init__(self, state: State, agreement: Agreement) -> None:
        self._state = state
        self._agreement = agreement
        self._watches: dict[Clock, Watch] = {}
        self._deferred = Deferred(state, self._report)

    def saw(self, clock: Clock, look: Look) -> None:
        """Keep what was seen after a backward pass of the current step."""
        if self._state.program.traps:
            self._watches.setdefault(clock, Watch()).looks.append(look)

    def done(self, clock: Clock) -> None:
        """Forget the looks: the step is over."""
        if (watch := self._watches.get(clock)) is not None:
            watch.looks.clear()

    def decide(self, clock: Clock, finals: Finals) -> Verdict:
        """Judge the gradients that the optimizer is about to consume, before rules at `step` edit them.

        Args:
            clock: that of the optimizer.
            finals: its gradients.

        Returns:
            What is to happen to the step. Reads the device once, and again only for a report.
        """
        if (error := self._deferred.settled()) is not None:
            return self._conclude(clock, [], error=error)
        if (watch := self._watches.get(clock)) is not None:
            watch.scaled_away = 0
        return self._conclude(clock, [*self._of_params(clock, finals), *self._of_sites(clock)])

    def decide_edited(self, clock: Clock, edited: set[int]) -> Verdict:
        """Judge gradients once more that rules at `step` may have made non-finite."""
        agenda = self._state.agenda(clock)
        tensors, grads = self._state.targets.grads(sorted(edited.intersection(agenda.trapped)))
        by_tensor = dict(zip(tensors, grads, strict=True))
        bad = suspects(measure.norms(tensors, grads))
        now = measure.counts({tensor: by_tensor[tensor] for tensor in bad})
        watch = self._watches.setdefault(clock, Watch())
        order = self._state.targets.grads(agenda.trapped)[0]

        def finding(_: tuple[int, ...]) -> Finding:
            moment = "right before the update, and finite before the rules at `step`"
            return Border(moment, tuple(order), now, {}).finding(self._state.program.names)

        tripped = [lane.rule for lane in agenda.traps if not now.keys().isdisjoint(lane.tensors)]
        trips = [watch.tripped(cast("NanTrap", rule), clock.step, finding) for rule in tripped]
        return self._conclude(clock, trips)

    def measure(self, clock: Clock, finals: Finals) -> None:
        """Take part in what other ranks measure, and make nothing of it."""
        self._of_params(clock, finals)

    def rest(self, clock: Clock) -> Verdict:
        """Look at nothing, and do what other ranks have decided, who may wait for this one."""
        return self._conclude(clock, [])

    def _conclude(
        self,
        clock: Clock,
        trips: Sequence[Trip],
        *,
        error: NonFiniteGradientError | None = None,
        floor: int = FINE,
    ) -> Verdict:
        """Return what all ranks do that make this update together. A collective where they meet.

        Args:
            clock: of the optimizer.
            trips: what this rank has to say.
            error: what it has to raise whatever they come to.
            floor: how bad it is at the least.
        """
        verdict = Verdict(error=error)
        if error is not None:
            verdict.word = Word(error.rank, error.rule, error.name or "", str(error))
        own = max(floor, FINE if error is None else RAISE, *[trip.severity for trip in trips], FINE)
        met = self._agreement.meet(clock, own, guilty=any(trip.guilty for trip in trips))
        for trip in trips:
            self._act(trip, verdict, met.guilty)
        if met.groups and met.severity > FINE:
            rank = _dist.rank()
            overflow = Word(rank, "", "", _OVERFLOW.format(step=clock.step, rank=rank))
            word = met.hear(verdict.word or overflow)
            if met.severity > own:
                self._follow(clock.step, met.severity, word, verdict)
        return verdict

    def _follow(self, step: int, severity: int, word: Word, verdict: Verdict) -> None:
        """Do what another rank has to do."""
        verdict.word = word
        rule, name = word.rule, word.name
        head = f"step {step}: rank {word.rank} trapped, and all ranks"
        if severity < RAISE:
            verdict.skip = True
            text = f"{head} skip the step: {word.text}" if rule else word.text
            self._state.journal.emit("skipped-step", text, rule=rule, step=step, name=name)
            return
        text = f"{head} stop: {word.text}"
        self._state.journal.emit("trap", text, rule=rule, step=step, name=name, raised=True)
        verdict.error = NonFiniteGradientError(
            text, rule=rule, step=step, rank=word.rank, name=name
        )

    def defer(self, clock: Clock, finals: Finals) -> Verdict | None:
        """Leave the decision to the device, for an optimizer that reads its flag; report later.

        Args:
            clock: that of the optimizer.
            finals: its gradients.

        Returns:
            What is to happen to the step; ``None`` where the host has to decide. Reads nothing.
        """
        state = self._state
        agenda = state.agenda(clock)
        # Whether to skip may be for other ranks to say as well.
        if not agenda.traps or self._agreement.may_meet(clock):
            return None
        watch = self._watches.setdefault(clock, Watch())
        tensors = finals.having(agenda.trapped)
        grads = finals.of(tensors)
        if not self._deferred.can_judge(agenda, grads, watch.looks):
            return None
        if (error := self._deferred.due()) is not None:
            return Verdict(error=error)
        watch.scaled_away = 0
        flag = self._deferred.judge(clock, agenda.traps, (tensors, grads), watch.looks)
        for lane in agenda.traps:
            if not set(lane.tensors).isdisjoint(tensors):
                state.journal.fired(lane.rule.id, clock.step)
        return Verdict(flag=flag)

    def settle(self, *, wait: bool = True) -> None:
        """Report what the device has decided. Waits for it where there is something to report."""
        self._deferred.settle(wait=wait)

    def _report(self, case: Case, values: list[float]) -> NonFiniteGradientError | None:
        """Say what the device has decided in an earlier step; return the error that is due."""
        watch = self._watches.setdefault(case.clock, Watch())
        if math.isfinite(sum(values)):  # float32 cannot make a sum of doubles overflow
            for lane in case.lanes:
                if not set(lane.tensors).isdisjoint(case.tensors):
                    watch.in_a_row[lane.rule.id] = 0
            return None
        numbers = iter(values)
        looks, now = case.looks_with(numbers), case.bad(numbers)
        seen = Seen(certainly_bad(looks, now), now)
        # It comes at another moment on each rank, which can only speak for itself.
        ranks = (_dist.rank(),) if is_guilty(looks, seen) else ()
        evidence = Evidence(self._state.program.names, looks, seen, case.tensors)
        verdict = Verdict()
        trips = self._judge(
            case.lanes,
            case.step,
            watch=watch,
            seen=seen,
            tensors=case.tensors,
            finding=evidence.finding,
        )
        for trip in trips:
            self._act(trip, verdict, ranks)
        return verdict.error

    def _judge(
        self,
        lanes: Iterable[Lane],
        step: int,
        *,
        watch: Watch,
        seen: Seen,
        tensors: Collection[int],
        finding: Callable[[tuple[int, ...]], Finding],
    ) -> list[Trip]:
        """Let each trap that was due judge the gradients that it watches."""
        trips = []
        guilty = is_guilty(watch.looks, seen)
        for lane in lanes:
            rule = cast("NanTrap", lane.rule)
            having = [tensor for tensor in lane.tensors if tensor in tensors]
            if not having:
                continue
            if any(tensor in seen.now for tensor in having):
                trips.append(watch.tripped(rule, step, finding, guilty=guilty))
            else:
                watch.in_a_row[rule.id] = 0
                repaired = [tensor for tensor in having if tensor in seen.before]
                self._mention_repair(rule, step, repaired)
        return trips

    def _of_params(self, clock: Clock, finals: Finals) -> list[Trip]:
        state = self._state
        agenda = state.agenda(clock)
        tensors = finals.having(agenda.trapped)
        if not tensors:
            return []
        watch = self._watches.setdefault(clock, Watch())
        last = watch.looks[-1] if watch.looks else None
        # On the host the look has been exact; on a device its norms come along with those of now.
        unread = last.norms if last is not None and last.counts is None else ()
        fresh = finals.norms_handed_over(tensors)
        before, doubtful = suspects_of(unread, fresh)
        clean = not (before or doubtful or (last is not None and last.counts))
        if clean and last is not None and state.scaling.scale is None:
            tell_of_foreign_scale(state, clock, last.norms, fresh)
        for lane in agenda.traps:
            if len(tensors) == len(agenda.trapped) or not set(lane.tensors).isdisjoint(tensors):
                state.journal.fired(lane.rule.id, clock.step)
                if clean:
                    watch.in_a_row[lane.rule.id] = 0
        if clean:
            return []
        now = measure.counts(dict(zip(doubtful, finals.of(doubtful), strict=True)))
        same = last is not None and finite(last.norms) == finite(fresh)
        seen = Seen(certainly_bad(watch.looks, now), now, fresh, unchanged=same)
        return self._judge(
            agenda.traps,
            clock.step,
            watch=watch,
            seen=seen,
            tensors=set(tensors),
            finding=Evidence(state.program.names, watch.looks, seen, tensors).finding,
        )

    def _of_sites(self, clock: Clock) -> list[Trip]:
        """Judge what traps on module tensors and tags saw since the last update."""
        by_rule: dict[str, list[tuple[Flag, int]]] = {}
        for flag, count in self._state.flags.take(clock, self._state.clocks.common):
            by_rule.setdefault(flag.rule.id, []).append((flag, count))
        watch = self._watches.setdefault(clock, Watch()) if by_rule else Watch()
        trips = []
        for rule_id, flags in by_rule.items():
            if not any(count for _, count in flags):
                watch.in_a_row[rule_id] = 0
                continue
            rule = cast("NanTrap", flags[0][0].rule)
            trips.append(watch.tripped(rule, clock.step, partial(finding_of_flags, flags)))
        return trips

    def scaled_away(self, clock: Clock, scale: Tensor) -> None:
        """Note a step that a scaler has skipped, and tell an overflow from a NaN that never ends.

        Args:
            clock: that of the optimizer.
            scale: of the scaler.

        Raises:
            NonFiniteGradientError: too many in a row, or the scale has come down to nothing.
        """
        if self._state.paused:
            self._conclude(clock, [], floor=OVERFLOWED)
            return
        state, watch = self._state, self._watches.setdefault(clock, Watch())
        watch.scaled_away += 1
        low = float(scale) < 1.0
        state.journal.emit("scaler-skip", SCALER_SKIP.format(step=clock.step), step=clock.step)
        trips = []
        for stage in state.program.traps:
            rule = cast("NanTrap", stage.rule)
            many = low or watch.scaled_away >= rule.give_up_after
            if state.mode == "observe" or not (many and rule.steps.due(clock.step)):
                continue
            tensors, grads = state.targets.grads(stage.tensors)
            if not tensors:
                continue
            last = watch.looks[-1].norms if watch.looks else measure.norms(tensors, grads)
            found = suspects(last)
            bad = frozenset(tensor for tensor in found if tensor in stage.tensors)
            if not bad:
                continue
            seen = Seen(bad, {}, last)
            why = "its scale is below 1" if low else f"{watch.scaled_away} steps in a row"
            text = f"the GradScaler keeps skipping ({why}): "
            evidence = Evidence(state.program.names, watch.looks, seen, tensors, text)
            watch.in_a_row[rule.id] = rule.give_up_after
            guilty = is_guilty(watch.looks, seen)
            trips.append(watch.tripped(rule, clock.step, evidence.finding, guilty=guilty))
        verdict = self._conclude(clock, trips, floor=OVERFLOWED)
        if verdict.error is not None:
            raise verdict.error

    def _act(self, trip: Trip, verdict: Verdict, ranks: tuple[int, ...] = ()) -> None:
        """Say what a trap has found, and what becomes of the step.

        Args:
            trip: of the trap.
            verdict: on the step.
            ranks: those that contributed what is not finite to an average.
        """
        state, rule, step, then = self._state, trip.rule, trip.step, trip.then
        finding = trip.finding(ranks)
        name = finding.name
        head = f"{state.place(step, rule.id)}: {finding.head}"
        text = "\n".join([head, outcome(rule, state.mode, then, trip.in_a_row), *finding.lines])
        state.journal.altered(rule.id, torch.ones((), dtype=torch.bool))
        how = {"warn": then == "warn", "raised": then == "raise"} if state.mode == "act" else {}
        state.journal.emit("trap", text, rule=rule.id, step=step, name=name, **how)
        if state.mode == "observe":
            return
        rank = finding.ranks[0] if finding.ranks else _dist.rank()
        word = Word(rank, rule.id, name, text)
        if then == "raise" and verdict.error is None:
            # What stops a step is what the other ranks have to hear of.
            verdict.word = word
            verdict.error = NonFiniteGradientError(
                text, rule=rule.id, step=step, rank=rank, name=name
            )
        elif then == "skip-step":
            verdict.word = verdict.word or word
            verdict.skip = True
            message = f"step {step} skipped: no weight and no optimizer state was touched"
            state.journal.emit("skipped-step", message, rule=rule.id, step=step, name=name)

    def _mention_repair(self, rule: Rule, step: int, repaired: Sequence[int]) -> None:
        if not repaired:
            return
        names = [self._state.program.names[tensor] for tensor in repaired]
        text = (
            f"{len(names)} gradients were non-finite after backward and finite at the update "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): "  # noqa: PLR2004 # as shown
            "repaired in between, no trap"
        )
        self._state.journal.emit("notice", text, rule=rule.id, step=step, name=names[0])
