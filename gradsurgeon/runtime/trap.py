"""The decision of `nan-trap`: taken right before the update, reported by the first look after backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _torch
from gradsurgeon.actions import Rule
from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.errors import NonFiniteGradientError, printable
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.look import Look, measure, suspects
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.targets import mark

_SHOWN = 12


@dataclass(slots=True)
class Verdict:
    """What the traps say about one update."""

    skip: bool = False
    error: NonFiniteGradientError | None = None
    # Parameters that a `freeze` rule hides from the optimizer in this step.
    frozen: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Border:
    """Which gradients were finite and which were not, in the order in which backward made them."""

    moment: str
    order: tuple[int, ...]
    bad: dict[int, tuple[str, int]]
    norms: dict[int, float]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a trap has to say: the first culprit, the first line, the lines after the outcome."""

    name: str
    head: str
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision rests on.

    Attributes:
        before: tensors that were non-finite at the last look after backward.
        now: tensors that are, with what kind and how many elements, counted exactly.
        stale: tensors whose gradient has changed since that look.
    """

    before: frozenset[int]
    now: dict[int, tuple[str, int]]
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
        rules = {
            lane.rule.id: (cast("NanTrap", lane.rule), lane.tensors)
            for stage in state.program.traps
            for lane in state.lanes(stage)
            if lane.clock is clock and lane.rule.steps.due(clock.step)
        }
        watch = self._watches.setdefault(clock, Watch())
        tensors, grads = state.targets.grads(sorted({i for _, own in rules.values() for i in own}))
        if not tensors:
            return
        by_tensor = dict(zip(tensors, grads, strict=True))
        seen = self._compare(watch, by_tensor, edited)
        for rule, own in rules.values():
            having = [tensor for tensor in own if tensor in by_tensor]
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
            lines = ["in the order in which they came:", *_window(rows, bad[0]), last]
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
            finding = Finding(
                state.program.names[next(i for i in border.order if i in border.bad)],
                f"the GradScaler keeps skipping ({why}): {len(border.bad)} of {len(border.order)} "
                f"gradients are not finite {border.moment}",
                self._rows(border),
            )
            verdict = Verdict()
            watch.in_a_row[rule.id] = rule.give_up_after
            self._act(rule, clock, watch, verdict, finding)
            if verdict.error is not None:
                raise verdict.error

    def _compare(self, watch: Watch, grads: dict[int, Tensor], edited: set[int]) -> Seen:
        """Return what was non-finite at the last look, and exactly what is now."""
        look = watch.looks[-1] if watch.looks else None
        stale = {
            tensor
            for tensor, grad in grads.items()
            if look is None or tensor in edited or look.marks.get(tensor) != mark(grad)
        }
        fresh = measure(list(stale), [grads[tensor] for tensor in stale]) if stale else ()
        # One read per device decides; on the host the look has already been exact.
        if look is None:
            before: list[int] = []
        elif look.counts is not None:
            before = list(look.counts)
        else:
            before = suspects(look.norms)
        doubtful = [tensor for tensor in before if tensor in grads and tensor not in stale]
        doubtful += suspects(fresh)
        now = {
            tensor: count
            for tensor in sorted(doubtful)
            if (count := _torch.first_nonfinite(grads[tensor]))[1]
        }
        # A norm that overflowed is no proof; where the gradient is still there it has been counted.
        real = frozenset(tensor for tensor in before if tensor in stale or tensor in now)
        return Seen(real, now, frozenset(stale))

    def _border(self, watch: Watch, seen: Seen, grads: dict[int, Tensor]) -> Border:
        """Return the border as the first look of the step saw it, else as it is now."""
        for number, look in enumerate(watch.looks, 1):
            bad = look.counts
            if bad is None:
                # Elements can be counted only where the gradient is still the one that was seen.
                unknown = ("NaN/Inf", 0)
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
                return Border(f"after backward{passes}", order, bad, _as_dict(look.norms))
        norms = _as_dict(measure(list(grads), list(grads.values())))
        order = watch.looks[-1].order if watch.looks else ()
        rest = tuple(tensor for tensor in grads if tensor not in order)
        moment = "right before the update, and finite after backward: something in between did it"
        if not watch.looks:
            moment = "right before the update"
        return Border(moment, (*order, *rest), seen.now, norms)

    def _trip(
        self, rule: NanTrap, clock: Clock, watch: Watch, border: Border, verdict: Verdict
    ) -> None:
        state = self._state
        first = next(tensor for tensor in border.order if tensor in border.bad)
        head = f"{len(border.bad)} of {len(border.order)} gradients are not finite {border.moment}"
        finding = Finding(state.program.names[first], head, self._rows(border))
        self._act(rule, clock, watch, verdict, finding)

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
        if then == "raise" and verdict.error is None:
            verdict.error = NonFiniteGradientError(
                text, rule=rule.id, step=clock.step, rank=_torch.rank(), name=name
            )
        elif then == "skip-step":
            verdict.skip = True
            message = f"step {clock.step} skipped: no weight and no optimizer state was touched"
            state.journal.emit("skipped-step", message, rule=rule.id, step=clock.step, name=name)

    def _rows(self, border: Border) -> list[str]:
        """Return the border line by line, and what to make of it."""
        names = self._state.program.names
        width = max(len(printable(names[tensor])) for tensor in border.order)
        rows = []
        for tensor in border.order:
            kind, count = border.bad.get(tensor, ("", 0))
            label = printable(names[tensor]).ljust(width)
            if not kind:
                rows.append(f"    finite  {label}  norm {border.norms.get(tensor, 0.0):.3g}")
            elif count:
                rows.append(f"  > {kind:<6}  {label}  {count:,} element{'s' if count > 1 else ''}")
            else:
                rows.append(f"  > {kind}  {label}")
        first = next(n for n, tensor in enumerate(border.order) if tensor in border.bad)
        head = "in the order in which backward produced them:"
        return [head, *_window(rows, first), self._advice(border, first)]

    def _advice(self, border: Border, first: int) -> str:
        names = self._state.program.names
        culprit = printable(names[border.order[first]])
        if first == 0:
            return (
                f"{culprit} is the first that backward reached and already non-finite: look at the loss "
                "and at what comes after this layer in the forward pass"
            )
        last = printable(names[border.order[first - 1]])
        return f"the border lies between {last} (still finite) and {culprit} (first that is not)"

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


def _as_dict(norms: Sequence[tuple[tuple[int, ...], Tensor]]) -> dict[int, float]:
    return {i: float(v) for own, found in norms for i, v in zip(own, found.tolist(), strict=True)}


def _window(rows: list[str], first: int) -> list[str]:
    """Return the rows around the first bad one; what is left out is counted."""
    if len(rows) <= _SHOWN:
        return rows
    start = max(0, min(first - _SHOWN // 2, len(rows) - _SHOWN))
    stop = start + _SHOWN
    above = [f"    ... {start} more before"] if start else []
    below = [f"    ... {len(rows) - stop} more after"] if stop < len(rows) else []
    return [*above, *rows[start:stop], *below]
