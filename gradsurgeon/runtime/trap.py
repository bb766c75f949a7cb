"""The decision of `nan-trap`: taken right before the update, reported by the first look after backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Rule
from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.errors import NonFiniteGradientError, printable
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.agenda import Lane
from gradsurgeon.runtime.border import Border, Finding, window
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.deferred import Case, Deferred
from gradsurgeon.runtime.final import Finals
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import Count, as_dict, suspects, suspects_of
from gradsurgeon.runtime.ranks import Word
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.verdict import Seen, Verdict, Watch, outcome


class Traps:
    """All `nan-trap` rules of a session."""

    def __init__(self, state: State) -> None:
        self._state = state
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
        verdict = Verdict(error=self._deferred.settled())
        if verdict.error is not None:
            return verdict
        if (watch := self._watches.get(clock)) is not None:
            watch.scaled_away = 0
        self._decide_params(clock, finals, verdict)
        self._decide_sites(clock, verdict)
        return verdict

    def decide_edited(self, clock: Clock, edited: set[int], verdict: Verdict) -> None:
        """Judge gradients once more that rules at `step` may have made non-finite."""
        agenda = self._state.agenda(clock)
        tensors, grads = self._state.targets.grads(edited.intersection(agenda.trapped))
        bad = suspects(measure.norms(tensors, grads))
        by_tensor = dict(zip(tensors, grads, strict=True))
        now = measure.counts({tensor: by_tensor[tensor] for tensor in bad})
        if not now:
            return
        watch = self._watches.setdefault(clock, Watch())

        def border() -> Border:
            moment = "right before the update, and finite before the rules at `step`"
            order, final = self._state.targets.grads(agenda.trapped)
            return Border(moment, tuple(order), now, _norms_of(order, final), ())

        tripped = [lane for lane in agenda.traps if not now.keys().isdisjoint(lane.tensors)]
        for lane in tripped:
            finding = border().finding(self._state.program.names)
            self._act(cast("NanTrap", lane.rule), clock.step, watch, verdict, finding)

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
        if not agenda.traps:
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

    def settle(self) -> None:
        """Report what the device has decided. Waits for it where there is something to report."""
        self._deferred.settle()

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
        seen = Seen(_certainly_bad(looks, now), now)
        verdict = Verdict()

        def border() -> Border:
            return self._border(looks, seen, case.tensors, dict, late=True)

        self._judge(
            case.lanes,
            case.step,
            watch=watch,
            seen=seen,
            tensors=case.tensors,
            border=border,
            verdict=verdict,
        )
        return verdict.error

    def _judge(
        self,
        lanes: Iterable[Lane],
        step: int,
        *,
        watch: Watch,
        seen: Seen,
        tensors: Collection[int],
        border: Callable[[], Border],
        verdict: Verdict,
    ) -> None:
        """Let each trap that was due judge the gradients that it watches."""
        for lane in lanes:
            rule = cast("NanTrap", lane.rule)
            having = [tensor for tensor in lane.tensors if tensor in tensors]
            if not having:
                continue
            if any(tensor in seen.now for tensor in having):
                finding = border().finding(self._state.program.names)
                self._act(rule, step, watch, verdict, finding)
            else:
                watch.in_a_row[rule.id] = 0
                repaired = [tensor for tensor in having if tensor in seen.before]
                self._mention_repair(rule, step, repaired)

    def _decide_params(self, clock: Clock, finals: Finals, verdict: Verdict) -> None:
        state = self._state
        agenda = state.agenda(clock)
        tensors = finals.having(agenda.trapped)
        if not tensors:
            return
        watch = self._watches.setdefault(clock, Watch())
        last = watch.looks[-1] if watch.looks else None
        # On the host the look has been exact; on a device its norms come along with those of now.
        unread = last.norms if last is not None and last.counts is None else ()
        before, doubtful = suspects_of(unread, finals.norms_handed_over(tensors))
        for lane in agenda.traps:
            if len(tensors) == len(agenda.trapped) or not set(lane.tensors).isdisjoint(tensors):
                state.journal.fired(lane.rule.id, clock.step)
                if not (before or doubtful or (last is not None and last.counts)):
                    watch.in_a_row[lane.rule.id] = 0
        if not (before or doubtful or (last is not None and last.counts)):
            return
        now = measure.counts(dict(zip(doubtful, finals.of(doubtful), strict=True)))
        same = last is not None and _finite(last.norms) == _finite(
            finals.norms_handed_over(tensors)
        )
        seen = Seen(_certainly_bad(watch.looks, now), now, same)

        def border() -> Border:
            return self._border(
                watch.looks, seen, tensors, partial(_norms_of, tensors, finals.of(tensors))
            )

        self._judge(
            agenda.traps,
            clock.step,
            watch=watch,
            seen=seen,
            tensors=set(tensors),
            border=border,
            verdict=verdict,
        )

    def _decide_sites(self, clock: Clock, verdict: Verdict) -> None:
        """Judge what traps on module tensors and tags saw since the last update."""
        by_rule: dict[str, list[tuple[Flag, int]]] = {}
        for flag, count in self._state.flags.take(clock):
            by_rule.setdefault(flag.rule.id, []).append((flag, count))
        watch = self._watches.setdefault(clock, Watch()) if by_rule else Watch()
        for rule_id, flags in by_rule.items():
            bad = [place for place, (_, count) in enumerate(flags) if count]
            if not bad:
                watch.in_a_row[rule_id] = 0
                continue
            rows = [
                f"  > non-finite  the {flag.what} of {printable(flag.name)}  {count:,} elements"
                if count
                else f"    finite      the {flag.what} of {printable(flag.name)}"
                for flag, count in flags
            ]
            first = flags[bad[0]][0]
            head = f"{len(bad)} of {len(flags)} tensors are not finite"
            last = f"the first that is not finite is the {first.what} of {printable(first.name)}"
            lines = ["in the order in which they came:", *window(rows, bad[0]), last]
            rule = cast("NanTrap", first.rule)
            self._act(rule, clock.step, watch, verdict, Finding(first.name, head, lines))

    def scaled_away(self, clock: Clock, scale: Tensor) -> None:
        """Note a step that a scaler has skipped, and tell an overflow from a NaN that never ends.

        Args:
            clock: that of the optimizer.
            scale: of the scaler.

        Raises:
            NonFiniteGradientError: too many in a row, or the scale has come down to nothing.
        """
        state, watch = self._state, self._watches.setdefault(clock, Watch())
        watch.scaled_away += 1
        low = float(scale) < 1.0
        text = f"the GradScaler skipped step {clock.step}: the scaled gradients overflowed"
        state.journal.emit("scaler-skip", text, step=clock.step)
        if state.mode == "observe":
            return
        for stage in state.program.traps:
            rule = cast("NanTrap", stage.rule)
            if not rule.steps.due(clock.step) or not (
                low or watch.scaled_away >= rule.give_up_after
            ):
                continue
            tensors, grads = state.targets.grads(stage.tensors)
            if not tensors:
                continue
            last = watch.looks[-1].norms if watch.looks else measure.norms(tensors, grads)
            found = suspects(last)
            bad = frozenset(tensor for tensor in found if tensor in stage.tensors)
            if not bad:
                continue
            seen = Seen(bad, {})
            border = self._border(watch.looks, seen, tensors, partial(_norms_of, tensors, grads))
            why = "its scale is below 1" if low else f"{watch.scaled_away} steps in a row"
            finding = border.finding(
                state.program.names, f"the GradScaler keeps skipping ({why}): "
            )
            verdict = Verdict()
            watch.in_a_row[rule.id] = rule.give_up_after
            self._act(rule, clock.step, watch, verdict, finding)
            if verdict.error is not None:
                raise verdict.error

    def _border(
        self,
        looks: Sequence[Look],
        seen: Seen,
        tensors: Sequence[int],
        norms: Callable[[], dict[int, float]],
        *,
        late: bool = False,
    ) -> Border:
        """Return the border as the first look of the step saw it, else as it was at the update."""
        ranks = self._contributors(looks, seen, late=late)
        for number, look in enumerate(looks, 1):
            bad = look.counts
            if bad is None:
                # What was seen on a device can be counted only where the script has not clipped since.
                found = as_dict(look.norms)
                bad = {
                    tensor: (seen.now if seen.unchanged else {}).get(
                        tensor, Count("NaN" if math.isnan(found[tensor]) else "Inf", 0)
                    )
                    for tensor in found
                    if not math.isfinite(found[tensor]) and tensor in seen.before
                }
            if bad:
                many = len(looks) > 1
                passes = f", micro-batch {number} of {len(looks)}" if many else ""
                # Some may have kept a gradient from an earlier pass and got nothing in this one.
                rest = tuple(tensor for tensor in look.tensors if tensor not in look.order)
                order = (*look.order, *rest)
                return Border(f"after backward{passes}", order, bad, as_dict(look.norms), ranks)
        order = looks[-1].order if looks else ()
        rest = tuple(tensor for tensor in tensors if tensor not in order)
        moment = "right before the update, and finite after backward: something in between did it"
        if not looks:
            moment = "right before the update"
        return Border(moment, (*order, *rest), seen.now, norms(), ranks)

    def _contributors(self, looks: Sequence[Look], seen: Seen, *, late: bool) -> tuple[int, ...]:
        """Return the ranks whose share of an average was not finite. A collective where there is one.

        Whether there is one must not depend on what a rank has seen by itself, such as a micro-batch
        that was not reduced: it depends on the last pass alone, which is the one that reduced. A rank
        whose part of the model was not used has no look at all, and got its gradients from the others.

        Reports that come late do so at another moment on each rank, which can only speak for itself.
        """
        last = looks[-1] if looks else None
        if not (self._state.ranks.averaging if last is None else last.averaged):
            return ()
        own = {} if last is None else last.own
        bad = [own[tensor] for tensor in seen.before.union(seen.now) if tensor in own]
        guilty = any(not bool(norm.isfinite()) for norm in bad)
        if late:
            return (_dist.rank(),) if guilty else ()
        return self._state.ranks.who(guilty)

    def _act(
        self, rule: NanTrap, step: int, watch: Watch, verdict: Verdict, finding: Finding
    ) -> None:
        state = self._state
        in_a_row = watch.in_a_row[rule.id] = watch.in_a_row.get(rule.id, 0) + 1
        then = rule.then
        if in_a_row >= rule.give_up_after:
            then = "raise"
        name = finding.name
        head = f"{state.place(step, rule.id)}: {finding.head}"
        text = "\n".join([head, outcome(rule, state.mode, then, in_a_row), *finding.lines])
        state.journal.altered(rule.id, torch.ones((), dtype=torch.bool))
        warn = then == "warn" and state.mode == "act"
        state.journal.emit("trap", text, rule=rule.id, step=step, name=name, warn=warn)
        if state.mode == "observe":
            return
        rank = finding.ranks[0] if finding.ranks else _dist.rank()
        verdict.word = verdict.word or Word(rank, rule.id, name, text)
        if then == "raise" and verdict.error is None:
            verdict.error = NonFiniteGradientError(
                text, rule=rule.id, step=step, rank=rank, name=name
            )
        elif then == "skip-step":
            verdict.skip = True
            message = f"step {step} skipped: no weight and no optimizer state was touched"
            state.journal.emit("skipped-step", message, rule=rule.id, step=step, name=name)

    @property
    def differ_by_rank(self) -> bool:
        """Whether a rank can see something that the others do not."""
        return any(rule.role == "trap" for rule, _ in self._state.program.site_rules)

    def agree(self, clock: Clock, verdict: Verdict) -> None:
        """Let all ranks do what the worst off of them has to do. A collective."""
        ranks = self._state.ranks
        own = 2 if verdict.error is not None else int(verdict.skip)
        severity, source = ranks.worst(own)
        if severity == 0:
            return
        word = ranks.hear(verdict.word, source)
        if severity == own:
            return
        step, rule, name = clock.step, word.rule, word.name
        head = f"step {step}: rank {word.rank} trapped, and all ranks"
        if severity == 1:
            verdict.skip = True
            text = f"{head} skip the step: {word.text}"
            self._state.journal.emit("skipped-step", text, rule=rule, step=step, name=name)
            return
        text = f"{head} stop: {word.text}"
        self._state.journal.emit("trap", text, rule=rule, step=step, name=name)
        verdict.error = NonFiniteGradientError(
            text, rule=rule, step=step, rank=word.rank, name=name
        )

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


def _certainly_bad(looks: Sequence[Look], now: Mapping[int, Count]) -> frozenset[int]:
    """Return the tensors that were non-finite at the last look.

    A norm of a device can overflow over elements that are finite; NaN it becomes only by what is not.
    """
    if not looks:
        return frozenset()
    last = looks[-1]
    if last.counts is not None:
        return frozenset(last.counts)
    norms = as_dict(last.norms).items()
    return frozenset(i for i, n in norms if math.isnan(n) or (math.isinf(n) and i in now))


def _finite(norms: measure.Norms) -> dict[int, float | None]:
    """Return norms by tensor, none for what is not finite, so that they can be compared."""
    return {i: norm if math.isfinite(norm) else None for i, norm in as_dict(norms).items()}


def _norms_of(tensors: Sequence[int], grads: Sequence[Tensor]) -> dict[int, float]:
    return as_dict(measure.norms(tensors, grads))
