"""The decision of `nan-trap`: taken right before the update, reported by the first look after backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Rule
from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.errors import NonFiniteGradientError, printable
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.border import Border, Finding, window
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import Count, as_dict, suspects
from gradsurgeon.runtime.ranks import Word
from gradsurgeon.runtime.state import State


@dataclass(slots=True)
class Verdict:
    """What the traps say about one update."""

    skip: bool = False
    error: NonFiniteGradientError | None = None
    # Parameters that a `freeze` rule hides from the optimizer in this step.
    frozen: tuple[int, ...] = ()
    # What led to it, for ranks that have seen nothing.
    word: Word | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision rests on.

    Attributes:
        before: tensors that were non-finite at the last look after backward.
        now: tensors that are, with what kind and how many elements, counted exactly.
        stale: tensors whose gradient has changed since that look.
    """

    before: frozenset[int]
    now: dict[int, Count]
    stale: frozenset[int]


@dataclass(slots=True)
class Watch:
    """The looks of the current step of one clock, and how often each trap tripped in a row."""

    looks: list[Look] = field(default_factory=list)
    in_a_row: dict[str, int] = field(default_factory=dict)
    scaled_away: int = 0


class Traps:
    """All `nan-trap` rules of a session."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._watches: dict[Clock, Watch] = {}

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
        verdict = Verdict()
        if (watch := self._watches.get(clock)) is not None:
            watch.scaled_away = 0
        self._decide_params(clock, edited, verdict)
        self._decide_sites(clock, verdict)
        return verdict

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
            rule = cast("NanTrap", lane.rule)
            having = [tensor for tensor in lane.tensors if tensor in by_tensor]
            if not having:
                continue
            state.journal.fired(rule.id, clock.step)
            if any(tensor in seen.now for tensor in having):
                border = self._border(watch, seen, by_tensor)
                self._trip(rule, clock, watch, border, verdict)
            else:
                watch.in_a_row[rule.id] = 0
                self._mention_repair(
                    rule, clock, [tensor for tensor in having if tensor in seen.before]
                )

    @staticmethod
    def _is_clean(
        watch: Watch, tensors: Sequence[int], grads: Sequence[Tensor], edited: set[int]
    ) -> bool:
        """Tell whether all gradients have been counted after backward, were finite, and still are."""
        look = watch.looks[-1] if watch.looks else None
        return (
            look is not None and look.counts == {} and not edited and not look.stale(tensors, grads)
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
            self._act(rule, clock, watch, verdict, Finding(first.name, head, lines))

    def scaled_away(self, clock: Clock) -> None:
        """Note a step that a scaler has skipped, and tell an overflow from a NaN that never ends.

        Raises:
            NonFiniteGradientError: too many in a row, or the scale has come down to nothing.
        """
        state, watch = self._state, self._watches.setdefault(clock, Watch())
        watch.scaled_away += 1
        scale = state.scaling.scale
        low = scale is not None and float(scale) < 1.0
        text = f"the GradScaler skipped step {clock.step}: the scaled gradients overflowed"
        state.journal.emit("scaler-skip", text, step=clock.step)
        if state.mode == "observe" or not watch.looks:
            return
        for stage in state.program.traps:
            rule = cast("NanTrap", stage.rule)
            if not rule.steps.due(clock.step) or not (
                low or watch.scaled_away >= rule.give_up_after
            ):
                continue
            tensors, grads = state.targets.grads(stage.tensors)
            found = suspects(watch.looks[-1].norms)
            bad = frozenset(tensor for tensor in found if tensor in stage.tensors)
            if not bad:
                continue
            seen = Seen(bad, {}, frozenset(tensors))
            border = self._border(watch, seen, dict(zip(tensors, grads, strict=True)))
            why = "its scale is below 1" if low else f"{watch.scaled_away} steps in a row"
            finding = border.finding(
                state.program.names, f"the GradScaler keeps skipping ({why}): "
            )
            verdict = Verdict()
            watch.in_a_row[rule.id] = rule.give_up_after
            self._act(rule, clock, watch, verdict, finding)
            if verdict.error is not None:
                raise verdict.error

    def _compare(self, watch: Watch, grads: dict[int, Tensor], edited: set[int]) -> Seen:
        """Return what was non-finite at the last look, and exactly what is now."""
        look = watch.looks[-1] if watch.looks else None
        changed = set(grads)
        if look is not None:
            order = list(grads)
            changed = {order[place] for place in look.stale(order, list(grads.values()))} | edited
        stale = [tensor for tensor in grads if tensor in changed]
        fresh = measure.norms(stale, [grads[tensor] for tensor in stale]) if stale else ()
        # One read per device decides; on the host the look has already been exact.
        if look is None:
            before: list[int] = []
        elif look.counts is not None:
            before = list(look.counts)
        else:
            before = suspects(look.norms)
        doubtful = [tensor for tensor in before if tensor in grads and tensor not in stale]
        doubtful += suspects(fresh)
        now = measure.counts({tensor: grads[tensor] for tensor in sorted(doubtful)})
        # A norm that overflowed is no proof; where the gradient is still there it has been counted.
        real = frozenset(tensor for tensor in before if tensor in stale or tensor in now)
        return Seen(real, now, frozenset(stale))

    def _border(self, watch: Watch, seen: Seen, grads: dict[int, Tensor]) -> Border:
        """Return the border as the first look of the step saw it, else as it is now."""
        for number, look in enumerate(watch.looks, 1):
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
                many = len(watch.looks) > 1
                passes = f", micro-batch {number} of {len(watch.looks)}" if many else ""
                # Some may have kept a gradient from an earlier pass and got nothing in this one.
                rest = tuple(tensor for tensor in look.tensors if tensor not in look.order)
                order = (*look.order, *rest)
                own = self._contributors(look, bad)
                return Border(f"after backward{passes}", order, bad, as_dict(look.norms), own)
        norms = as_dict(measure.norms(list(grads), list(grads.values())))
        order = watch.looks[-1].order if watch.looks else ()
        rest = tuple(tensor for tensor in grads if tensor not in order)
        moment = "right before the update, and finite after backward: something in between did it"
        if not watch.looks:
            moment = "right before the update"
        return Border(moment, (*order, *rest), seen.now, norms)

    def _contributors(self, look: Look, bad: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks whose share of an average was not finite. A collective where there is one."""
        if not look.averaged:
            return ()
        mine = [look.own[tensor] for tensor in bad if tensor in look.own]
        return self._state.ranks.who(any(not bool(norm.isfinite()) for norm in mine))

    def _trip(
        self, rule: NanTrap, clock: Clock, watch: Watch, border: Border, verdict: Verdict
    ) -> None:
        self._act(rule, clock, watch, verdict, border.finding(self._state.program.names))

    def _act(
        self, rule: NanTrap, clock: Clock, watch: Watch, verdict: Verdict, finding: Finding
    ) -> None:
        state = self._state
        in_a_row = watch.in_a_row[rule.id] = watch.in_a_row.get(rule.id, 0) + 1
        then = rule.then
        if in_a_row >= rule.give_up_after:
            then = "raise"
        name = finding.name
        head = f"step {clock.step}, rule {rule.id}: {finding.head}"
        text = "\n".join([head, _outcome(state, rule, then, in_a_row), *finding.lines])
        state.journal.altered(rule.id, torch.ones((), dtype=torch.bool))
        warn = then == "warn" and state.mode == "act"
        state.journal.emit("trap", text, rule=rule.id, step=clock.step, name=name, warn=warn)
        if state.mode == "observe":
            return
        rank = finding.ranks[0] if finding.ranks else _dist.rank()
        verdict.word = verdict.word or Word(rank, rule.id, name, text)
        if then == "raise" and verdict.error is None:
            verdict.error = NonFiniteGradientError(
                text, rule=rule.id, step=clock.step, rank=rank, name=name
            )
        elif then == "skip-step":
            verdict.skip = True
            message = f"step {clock.step} skipped: no weight and no optimizer state was touched"
            state.journal.emit("skipped-step", message, rule=rule.id, step=clock.step, name=name)

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

    def _mention_repair(self, rule: Rule, clock: Clock, repaired: Sequence[int]) -> None:
        if not repaired:
            return
        names = [self._state.program.names[tensor] for tensor in repaired]
        text = (
            f"{len(names)} gradients were non-finite after backward and finite at the update "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): "  # noqa: PLR2004 # as shown
            "repaired in between, no trap"
        )
        self._state.journal.emit("notice", text, rule=rule.id, step=clock.step, name=names[0])


def _outcome(state: State, rule: NanTrap, then: str, in_a_row: int) -> str:
    if state.mode == "observe":
        return f"observing only: `then: {rule.then}` would have acted"
    if then != rule.then:
        return f"giving up: tripped {in_a_row} times in a row (give_up_after: {rule.give_up_after})"
    return {
        "raise": "stopped before the update: no weight was moved",
        "skip-step": "step skipped: no weight and no optimizer state was touched",
        "warn": "the update goes on (`then: warn`): expect non-finite weights",
    }[then]
