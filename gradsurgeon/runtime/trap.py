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
from gradsurgeon.errors import NonFiniteGradientError, printable
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.agenda import Lane
from gradsurgeon.runtime.border import Border, Finding, window
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.deferred import Case, Deferred
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

    def decide(self, clock: Clock, edited: set[int]) -> Verdict:
        """Judge the gradients that the optimizer is about to consume.

        Args:
            clock: that of the optimizer.
            edited: tensors that a rule at `step` may have made non-finite since the last look.

        Returns:
            What is to happen to the step. Reads the device once, and again only for a report.
        """
        verdict = Verdict(error=self._deferred.settled())
        if verdict.error is not None:
            return verdict
        if (watch := self._watches.get(clock)) is not None:
            watch.scaled_away = 0
        self._decide_params(clock, edited, verdict)
        self._decide_sites(clock, verdict)
        return verdict

    def defer(self, clock: Clock, edited: set[int]) -> Verdict | None:
        """Leave the decision to the device, for an optimizer that reads its flag; report later.

        Args:
            clock: that of the optimizer.
            edited: as of `decide`.

        Returns:
            What is to happen to the step; ``None`` where the host has to decide. Reads nothing.
        """
        state = self._state
        agenda = state.agenda(clock)
        if not agenda.traps:
            return None
        watch = self._watches.setdefault(clock, Watch())
        tensors, grads = state.targets.grads(agenda.trapped)
        if not self._deferred.can_judge(agenda, grads, watch.looks):
            return None
        if (error := self._deferred.due()) is not None:
            return Verdict(error=error)
        watch.scaled_away = 0
        stale = watch.changed(tensors, grads, edited)
        flag = self._deferred.judge(clock, agenda.traps, (tensors, grads), watch.looks, stale)
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
        before = suspects(looks[-1].norms) if looks else []
        real = frozenset(tensor for tensor in before if tensor in case.stale or tensor in now)
        seen = Seen(real, now, case.stale)
        verdict = Verdict()

        def border() -> Border:
            known = as_dict(looks[-1].norms) if looks else {}
            norms = {i: known[i] for i in case.tensors if i in known and i not in case.stale}
            return self._border(looks, seen, case.tensors, lambda: norms, late=True)

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

    def _decide_params(self, clock: Clock, edited: set[int], verdict: Verdict) -> None:
        state = self._state
        agenda = state.agenda(clock)
        watch = self._watches.setdefault(clock, Watch())
        tensors, grads = state.targets.grads(agenda.trapped)
        if not tensors:
            return
        if self._is_clean(watch, tensors, grads, edited):
            for lane in agenda.traps:
                if len(tensors) == len(agenda.trapped) or not set(lane.tensors).isdisjoint(tensors):
                    state.journal.fired(lane.rule.id, clock.step)
                    watch.in_a_row[lane.rule.id] = 0
            return
        by_tensor = dict(zip(tensors, grads, strict=True))
        seen = self._compare(watch, by_tensor, edited)
        for lane in agenda.traps:
            if not by_tensor.keys().isdisjoint(lane.tensors):
                state.journal.fired(lane.rule.id, clock.step)

        def border() -> Border:
            return self._border(watch.looks, seen, tensors, partial(_norms_of, tensors, grads))

        self._judge(
            agenda.traps,
            clock.step,
            watch=watch,
            seen=seen,
            tensors=by_tensor.keys(),
            border=border,
            verdict=verdict,
        )

    @staticmethod
    def _is_clean(
        watch: Watch, tensors: Sequence[int], grads: Sequence[Tensor], edited: set[int]
    ) -> bool:
        """Tell whether all gradients have been counted after backward, were finite, and still are."""
        looks = watch.looks
        return bool(looks) and looks[-1].counts == {} and not watch.changed(tensors, grads, edited)

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

    def scaled_away(self, clock: Clock) -> None:
        """Note a step that a scaler has skipped, and tell an overflow from a NaN that never ends.

        Raises:
            NonFiniteGradientError: too many in a row, or the scale has come down to nothing.
        """
        state, watch = self._state, self._watches.setdefault(clock, Watch())
        watch.scaled_away += 1
        scale = state.scaling.stepping
        low = scale is not None and float(scale) < 1.0
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
            seen = Seen(bad, {}, frozenset(tensors))
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

    def _compare(self, watch: Watch, grads: dict[int, Tensor], edited: set[int]) -> Seen:
        """Return what was non-finite at the last look, and exactly what is now."""
        look = watch.looks[-1] if watch.looks else None
        changed = watch.changed(list(grads), list(grads.values()), edited)
        stale = [tensor for tensor in grads if tensor in changed]
        fresh = measure.norms(stale, [grads[tensor] for tensor in stale]) if stale else ()
        # One read per device decides; on the host the look has already been exact.
        unknown = look is not None and look.counts is None
        before, spoilt = suspects_of(look.norms if look is not None and unknown else (), fresh)
        if look is not None and look.counts is not None:
            before = list(look.counts)
        doubtful = [tensor for tensor in before if tensor in grads and tensor not in stale]
        doubtful += spoilt
        now = measure.counts({tensor: grads[tensor] for tensor in sorted(doubtful)})
        # A norm that overflowed is no proof; where the gradient is still there it has been counted.
        real = frozenset(tensor for tensor in before if tensor in stale or tensor in now)
        return Seen(real, now, frozenset(stale))

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
                # Elements can be counted only where the gradient is still the one that was seen.
                unknown = Count("NaN/Inf", 0)
                bad = {
                    tensor: unknown if tensor in seen.stale else seen.now.get(tensor, unknown)
                    for tensor in suspects(look.norms)
                    if tensor in seen.before
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
        how = {"warn": then == "warn", "raised": then == "raise"} if state.mode == "act" else {}
        state.journal.emit("trap", text, rule=rule.id, step=step, name=name, **how)
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
        word = verdict.word = ranks.hear(verdict.word, source)
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
        self._state.journal.emit("trap", text, rule=rule, step=step, name=name, raised=True)
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


def _norms_of(tensors: Sequence[int], grads: Sequence[Tensor]) -> dict[int, float]:
    return as_dict(measure.norms(tensors, grads))
