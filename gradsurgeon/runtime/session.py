"""A plan attached to a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from torch import nn
from torch.optim import Optimizer

from gradsurgeon.compiler import compile_plan
from gradsurgeon.errors import GradSurgeonError, RecordError, did_you_mean
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.match import nearest
from gradsurgeon.planning import Plan
from gradsurgeon.runtime.arming import Arming
from gradsurgeon.runtime.backward import Pass, Passes
from gradsurgeon.runtime.clock import Clock, Clocks
from gradsurgeon.runtime.edits import StepEdits
from gradsurgeon.runtime.journal import Journal
from gradsurgeon.runtime.look import after_pass
from gradsurgeon.runtime.manual import Manual
from gradsurgeon.runtime.recorder import Recorder
from gradsurgeon.runtime.state import Mode, State
from gradsurgeon.runtime.stepping import Steps
from gradsurgeon.runtime.targets import Targets
from gradsurgeon.runtime.trap import Traps, Verdict
from gradsurgeon.store import Records, Series, merged

_ELSEWHERE = (
    "an optimizer owns parameters of the model, but none that a rule matched: rules at `step` and "
    "traps do not act on what is not updated"
)


class Session:
    """Rules acting on one model, until `remove()` or the end of the ``with`` block.

    Made by `gradsurgeon.apply`. It reaches the model weakly and lives as long as the model does,
    even if the caller drops it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        optimizers: Sequence[Optimizer] | None,
        mode: Mode,
        start_step: int,
    ) -> None:
        program = compile_plan(plan)
        rules = plan.rules.rules
        self.plan = plan
        self._model = weakref.ref(model)
        self._records = Records()
        self._state = state = State(
            program=program,
            targets=Targets(model, program.names),
            clocks=Clocks(len(program.names), start_step),
            journal=Journal(rules, [len(plan.of(rule.id)) for rule in rules]),
            recorder=Recorder(self._records),
            mode=mode,
            edits={rule.id: rule.compile() for rule in rules if rule.role == "edit"},
        )
        self._aliases = {
            alias: param.name for param in plan.manifest.params for alias in param.aliases
        }
        self._traps = Traps(state)
        self._edits = StepEdits(state)
        self._passes = Passes(self._backward_ended)
        self._steps = Steps(
            state, judge=self._judge, finished=self._finished, first_owner=self._optimizer_appeared
        )
        declared = optimizers is not None and not optimizers
        self._manual = Manual(state, self._judge, self._finished, declared=declared)
        self._arming = Arming(state, self._passes)
        # Optimizers are held weakly once they are known.
        self._given = optimizers
        self._search_on = False
        self._when_removed: Callable[[], None] | None = None
        self._removed = False

    def attach(self, removed: Callable[[], None]) -> None:
        """Put the hooks on; on failure nothing stays. ``removed`` is called once they are off."""
        self._arming.arm()
        try:
            for optimizer in self._given or ():
                if self._steps.meet(optimizer) is None:
                    text = f"the optimizer {type(optimizer).__name__} holds no parameter that a rule matched"
                    self._state.journal.emit("notice", text, warn=True)
        except BaseException:
            self._detach()
            raise
        self._search_on = self._given is None
        self._given = None
        self._when_removed = removed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take everything off the model and its optimizers. Records and events stay readable."""
        if self._removed:
            return
        self._removed = True
        self._mention_silent()
        self._detach()

    def _detach(self) -> None:
        self._removed = True
        self._state.recorder.flush()
        self._steps.close()
        self._arming.disarm()
        self._state.targets.forget()
        self._state.paused = True
        if self._when_removed is not None:
            self._when_removed()

    @property
    def removed(self) -> bool:
        """Whether `remove()` has been called, or the model is gone."""
        return self._removed

    def pause(self) -> None:
        """Let no rule act until `resume()`; the clocks go on."""
        self._state.paused = True

    def resume(self) -> None:
        """Let the rules act again."""
        if not self._removed:
            self._state.paused = False

    @property
    def step(self) -> int:
        """The largest clock: the number of the next update, from ``start_step``."""
        return self._state.clocks.latest

    def tick(self) -> bool:
        """Mark one update of a script without torch optimizer, right before it happens.

        Returns:
            Whether to update: ``False`` where a trap with ``then: skip-step`` tripped.

        Raises:
            NonFiniteGradientError: a trap stops the update.
            GradSurgeonError: a torch optimizer owns the parameters; its steps count by themselves.
        """
        if self._steps.owned:
            raise GradSurgeonError(
                "tick() marks updates that are written by hand, but a torch optimizer owns the "
                "parameters and its steps are counted by themselves: remove the call"
            )
        return self._removed or self._manual.tick()

    @property
    def events(self) -> list[Event]:
        """What happened so far, oldest first."""
        return list(self._state.journal.events)

    def status(self) -> dict[str, RuleStatus]:
        """Return what each rule has done so far. Waits for the device."""
        return self._state.journal.status()

    @property
    def records(self) -> Records:
        """Everything measured so far. Waits for the device."""
        self._state.recorder.flush()
        return self._records

    def latest(self, name: str, stat: str = "l2", *, rule: str | None = None) -> float:
        """Return the newest record of one parameter.

        Args:
            name: canonical name or alias.
            stat: the statistic.
            rule: id of the `norm-log` rule; needed where several recorded it.

        Raises:
            KeyError: no such parameter; the nearest names are given.
            RecordError: nothing recorded, or by several rules.
        """
        return self.history(name, stat, rule=rule)[-1][1]

    def history(
        self, name: str, stat: str = "l2", *, rule: str | None = None
    ) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one parameter, oldest first.

        Args:
            name: canonical name or alias.
            stat: the statistic.
            rule: id of the `norm-log` rule; needed where several recorded it.

        Raises:
            KeyError: no such parameter; the nearest names are given.
            RecordError: nothing recorded, or by several rules.
        """
        known = [param.name for param in self.plan.manifest.params]
        canonical = self._aliases.get(name, name)
        if canonical not in known:
            every = [*known, *self._aliases]
            near = did_you_mean(name, every) or f"nearest: {', '.join(nearest(name, every))}"
            raise KeyError(f"no parameter {name!r} in the model; {near}")
        found = self.records.series(canonical, stat, rule)
        rules = sorted({series.key.rule for series in found})
        if len(rules) > 1:
            raise RecordError(
                f"{stat} of {canonical} is recorded by several rules: pass rule= one of {', '.join(rules)}"
            )
        rows = merged(found, canonical)
        if not rows:
            raise RecordError(self._why_no_record(canonical, stat, rule, found))
        return rows

    def _why_no_record(
        self, name: str, stat: str, rule: str | None, found: Sequence[Series]
    ) -> str:
        logging = {
            one.id: getattr(one, "stats", ())
            for one in self.plan.rules.rules
            if one.role == "observe" and name in {b.name for b in self.plan.of(one.id)}
        }
        if rule is not None and rule not in logging:
            hint = (
                did_you_mean(rule, logging)
                or f"rules that record it: {', '.join(logging) or 'none'}"
            )
            return f"the rule {rule!r} records nothing of {name}; {hint}"
        stats = sorted({one for own in logging.values() for one in own})
        if stat not in stats:
            return f"no rule records {stat} of {name}; recorded: {', '.join(stats) or 'nothing'}"
        del found
        return f"{stat} of {name} has not been recorded yet: no gradient has arrived"

    def meet(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that is about to step."""
        self._steps.meet(optimizer)

    def model_gone(self) -> None:
        """Let go of everything that belonged to the model."""
        if not self._removed:
            self._removed = True
            self._detach()

    def _search(self) -> bool:
        model = self._model()
        return model is not None and self._steps.search(model.parameters())

    def _backward_ended(self, done: Pass) -> None:
        if self._state.paused:
            return
        # Whose step this pass feeds decides which clock its records go by.
        by_hand = self._manual.active or not (self._steps.owned or self._optimizers_known())
        with self._manual.step_of(done):
            for clock, look in after_pass(self._state, done).items():
                self._traps.saw(clock, look)
        if by_hand and not self._manual.active:
            self._manual.begin(done)
            self._arming.guard(self._manual.guarded() or dict.fromkeys(done.order[:1], False))
        if by_hand:
            try:
                self._manual.after(done)
            finally:
                if done.continued:
                    self._traps.done(self._state.clocks.common)

    def _optimizers_known(self) -> bool:
        """Tell whether some optimizer updates the model; it may have been made after `apply`."""
        if self._search_on and self._search():
            self._search_on = False
            if not self._steps.owned:
                self._state.journal.emit("notice", _ELSEWHERE, step=self.step, warn=True)
        return not self._search_on

    def _optimizer_appeared(self) -> None:
        """Take back a step that was counted for want of an optimizer, which now takes it."""
        edited = self._manual.withdraw()
        self._edits.spare(edited)

    def _judge(self, clock: Clock) -> Verdict:
        """Do what is due right before an update."""
        return self._traps.decide(clock, self._edits.run(clock))

    def _finished(self, clock: Clock) -> None:
        """Count an attempted update, and look after what it showed."""
        if not self._state.paused:
            self._notice_silence(clock)
            self._look_after_hooks(clock)
        self._traps.done(clock)
        self._edits.forget()
        clock.tick()
        common = self._state.clocks.common
        if clock is common:
            # An optimizer that takes over from a hand-written update goes on with its count.
            self._state.clocks.start = clock.step
        elif common.step < clock.step:
            # What no optimizer owns goes by the one that is furthest.
            if not self._state.paused:
                self._notice_silence(common)
            self._traps.done(common)
            common.step = clock.step

    def _notice_silence(self, clock: Clock) -> None:
        state = self._state
        for stage in state.stages.values():
            for lane in state.lanes(stage):
                if lane.clock is clock and lane.rule.steps.due(clock.step):
                    cause = partial(self._why_silent, lane.tensors)
                    state.journal.passed(lane.rule.id, clock.step, cause)

    def _why_silent(self, tensors: Sequence[int]) -> str:
        params = [self._state.targets.param(tensor) for tensor in tensors]
        there = [param for param in params if param is not None]
        if not there:
            return "the parameters it matched are gone from the model"
        if not any(param.requires_grad for param in there):
            return "all parameters it matched are frozen"
        if all(param.grad is None for param in there):
            return "no gradient reached any parameter it matched"
        if self._steps.owned and self._state.clocks[tensors[0]] is self._state.clocks.common:
            return "no optimizer that steps owns any parameter it matched"
        return "the gradients of its parameters did not pass through its hooks"

    def _look_after_hooks(self, clock: Clock) -> None:
        for tensor in self._arming.replaced():
            name = self._state.program.names[tensor]
            if self._arming.rearm(tensor):
                text = (
                    f"{name} was replaced by another parameter: its hooks were put on the new one"
                )
                self._state.journal.emit(
                    "hook-rearmed", text, step=clock.step, name=name, warn=True
                )
            else:
                text = (
                    f"{name} is gone from its module: rules on it no longer act; apply them again "
                    "after the model has its final form"
                )
                self._state.journal.emit("hook-lost", text, step=clock.step, name=name, warn=True)

    def _mention_silent(self) -> None:
        for rule, due in self._state.journal.never_fired():
            text = "was due and never fired" if due else "was never due"
            self._state.journal.emit(
                "never-fired", f"{text} until the end", rule=rule, step=self.step
            )
