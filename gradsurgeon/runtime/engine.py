"""The controller of a session: what is done when a pass ends or a step begins, and in which order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon.actions import Rule
from gradsurgeon.planning import Plan, named_modules
from gradsurgeon.runtime.agreement import Agreement
from gradsurgeon.runtime.arming import Arming
from gradsurgeon.runtime.changes import ModelChanges
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.edits import StepEdits
from gradsurgeon.runtime.final import Finals
from gradsurgeon.runtime.look import after_pass
from gradsurgeon.runtime.manual import Manual, how_to_tick
from gradsurgeon.runtime.modules import ModuleHooks
from gradsurgeon.runtime.notices import count_passes, tell_of_no_pass, tell_of_unowned
from gradsurgeon.runtime.optimizers import why_not_met
from gradsurgeon.runtime.passes import Passes
from gradsurgeon.runtime.scaling import refuse_scaling
from gradsurgeon.runtime.silence import notice_silence
from gradsurgeon.runtime.sites import Sites
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.stepping import Steps
from gradsurgeon.runtime.tensor_hooks import TensorHooks
from gradsurgeon.runtime.timetable import ModuleClocks
from gradsurgeon.runtime.training_events import Pass, Step
from gradsurgeon.runtime.trap import Traps
from gradsurgeon.runtime.verdict import Verdict

# By then the optimizers of most scripts have stepped; others are looked for.
_SETTLED = 3


class Engine:
    """Puts the hooks of a session on and off, and receives the events of training in between.

    Args:
        model: reached weakly.
        state: what the rules may use while they act.
        plan: what the program was made of.
        optimizers: those the caller has named, ``None`` to look for them, empty where weights are
            updated by hand.
        provisional: whether an optimizer is going to update the model is not known yet.
    """

    def __init__(
        self,
        model: nn.Module,
        state: State,
        plan: Plan,
        optimizers: Sequence[Optimizer] | None,
        *,
        provisional: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self._state = state
        self._agreement = Agreement(state)
        self._traps = Traps(state, self._agreement)
        self._edits = StepEdits(state)
        self._passes = Passes(self, state.scaling)
        declared = optimizers is not None and not optimizers
        self.manual = Manual(state, self, declared=declared, provisional=provisional)
        self._arming = Arming(state, self._passes, self.manual)
        self._module_clocks = ModuleClocks(state.clocks, state.program.names)
        self.tensor_hooks = TensorHooks(Sites(state, self._passes, self._module_clocks))
        self._module_hooks = ModuleHooks(state.program.modules, self.tensor_hooks)
        self.model = ModelChanges(model, state, plan, self._arming, self._module_hooks)
        self.steps = Steps(state, self, self.model)
        self._search_on = optimizers is None
        # Whether backward passes came and no update has followed yet.
        self._unstepped = False
        self._steps = 0
        # The tensors that had a gradient before the hooks went on.
        self._early: set[int] = set()
        # Named optimizers are met when the hooks go on; then they are held weakly.
        self._given = list(optimizers or ())
        self.attached = False

    def attach(self) -> None:
        """Put the hooks on; on failure nothing stays."""
        try:
            self._early = set(self._state.targets.grads(range(len(self._state.targets)))[0])
            self._arming.arm()
            self._module_hooks.refresh(named_modules(self._model()))
            for optimizer in self._given:
                if self.steps.meet(optimizer) is None:
                    self._state.journal.emit("notice", why_not_met(optimizer), warn=True)
        except BaseException:
            self.detach()
            raise
        self._given.clear()
        self.attached = True

    def go_last(self) -> None:
        """Put the hooks on anew, so that they come after those of another session."""
        self._arming.again()
        self._module_hooks.detach()
        self._module_hooks.refresh(named_modules(self._model()))

    def detach(self) -> None:
        self.attached = False
        self.steps.close()
        self._module_hooks.detach()
        self._arming.disarm()
        self._state.targets.forget()
        self._state.paused = True

    def settle(self, *, wait: bool = True) -> None:
        """Note what the device has decided so far. Waits for it where there is something."""
        self._traps.settle(wait=wait)

    def backward_started(self) -> None:
        """Take notice of a backward pass.

        Raises:
            GradSurgeonError: the ranks may take different numbers of steps.
            BindError: a rule cannot act under loss scaling.
        """
        self.steps.end_failed()
        self._state.ranks.look_around()
        if self._state.scaling.scale is not None and not self._state.paused:
            refuse_scaling(self._state.program)

    def backward_finished(self, done: Pass) -> None:
        """Measure what a backward pass has left, and take the step of scripts that update by hand."""
        state = self._state
        self._agreement.gather(done.order, update=False)
        if state.paused:
            if self._agreement.is_missed(done.order, update=False):
                after_pass(state.silent(), done)
            return
        self._arrived(done)
        self.manual.look_back(done)
        # Whose step this pass feeds decides which clock its records go by.
        by_hand = self._feeds_a_parameter(done) and self._is_by_hand()
        with self.manual.step_of(done):
            for clock, look in after_pass(state, done).items():
                self._traps.saw(clock, look)
        count_passes(state, done)
        if by_hand:
            self._step_by_hand(done)

    def step_starting(self, step: Step) -> Verdict:
        """Do what is due right before an update: the trap decides, then rules at the step edit."""
        state, clock = self._state, step.clock
        if step.inside:
            if state.paused:
                return Verdict()
            # By the end of the pass the script has cleared this gradient.
            having, _ = state.targets.grads(clock.tensors)
            after_pass(state, Pass(order=having, scale=state.scaling.scale))
        else:
            self._passes.settle(step.scale)
            if self._is_idle(clock):
                return Verdict()
            self._agreement.gather(clock.tensors, update=True)
            if self._agreement.rests(clock.tensors):
                return self._rest(step)
            self._catch_up(step)
        agenda = state.agenda(clock)
        finals = Finals(state, {*agenda.judged, *agenda.stepped}, step.scale)
        # The trap judges what the script hands over: a rule that repairs it is no reason to go on.
        verdict = self._traps.decide(clock, finals, flaggable=step.flaggable)
        stopped = verdict.skip or verdict.error is not None
        suspicious = self._edits.run(clock, finals, step.scale, acting=not stopped)
        # By the rules alone, which are those of all ranks: they decide together.
        if not stopped and agenda.traps and any(lane.rule.may_overflow for lane in agenda.at_step):
            verdict = self._traps.decide_edited(clock, suspicious)
        if state.mode == "act":
            verdict = replace(verdict, frozen=tuple(sorted(agenda.frozen)))
        return verdict

    def step_finished(self, step: Step, *, took_place: bool) -> None:
        """Count an attempted update, and look after what it showed."""
        clock, state = step.clock, self._state
        if took_place and not state.paused:
            notice_silence(state, clock, self._module_clocks.of, owned=self.steps.owned)
            if not step.inside:  # the hooks on this very gradient may still be running
                self.model.after_step(clock)
        self._traps.done(clock)
        if not step.inside:
            state.scaling.stepped()
        self.tensor_hooks.missed(clock)
        clock.tick()
        self._unstepped = False
        self._steps += 1
        if self._steps == _SETTLED and self.steps.owned and not state.paused:
            self._tell_of_unowned()
        state.recorder.end_step()
        self._lead_common(clock)

    def step_skipped_by_scaler(self, clock: Clock, scale: Tensor) -> None:
        """Count an update that a scaler has skipped for overflow.

        Raises:
            NonFiniteGradientError: too many in a row, or the scale has come down to nothing.
        """
        try:
            self._passes.settle(None)
            self._traps.scaled_away(clock, scale)
        finally:
            self._state.flags.forget(clock)
            # No rule at the step point could fire in a step that did not take place.
            self.step_finished(Step(clock), took_place=False)

    def expects_update(self) -> bool:
        """Tell whether some optimizer updates the model; it may have been made after `apply`."""
        if self.steps.owned:
            return True
        if self._search_on:
            model = self._model()
            if model is not None and self.steps.search(model.parameters()):
                self._search_on = False
        return not self._search_on

    def optimizer_found(self) -> None:
        """Let the first optimizer count: the last pass may have been taken for a step by hand."""
        self._edits.spare(self.manual.withdraw())

    def losses_scaled(self, scaler: GradScaler, losses: Sequence[Tensor]) -> None:
        self._state.scaling.scaled(scaler, losses)

    @contextmanager
    def scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> Iterator[None]:
        """Find out whether a scaler that is to step an optimizer skips the step for overflow."""
        begun = self.steps.begun(optimizer)
        with self._state.scaling.steps(scaler, optimizer) as news:
            yield
            if news and self.attached:
                owner, scale = self.steps.meet(optimizer), self._state.scaling.stepping(optimizer)
                if owner is not None and owner.begun == begun and scale is not None:
                    self.step_skipped_by_scaler(owner.clock, scale)

    def step_after(self, others: Sequence[Engine], optimizer: Optimizer) -> None:
        """Let the rules at the step of an optimizer act after those of other sessions."""
        newest = self.steps.newest_hook(optimizer)
        if newest >= 0 and any(other.steps.newest_hook(optimizer) > newest for other in others):
            self.steps.go_last(optimizer)

    @property
    def tag_rules(self) -> tuple[Rule, ...]:
        return self._state.program.tags

    def why_never(self, *, due: bool) -> str:
        """Return why a rule has never fired by the time the session ends."""
        if due:
            return "was due and never fired"
        if self._unstepped:
            return "never fired: gradients came, but no optimizer that owns them ever stepped"
        if not self._steps:
            return "never fired: no gradient reached a parameter, and nothing was updated"
        return "was never due"

    def _arrived(self, done: Pass) -> None:
        self._unstepped |= bool(done.order)
        self._early.clear()
        self.model.arrived(done.order)
        self._edits.arrived(done.order)
        self._state.flags.passed()

    def _is_by_hand(self) -> bool:
        return self.manual.active or not self.expects_update()

    def _step_by_hand(self, done: Pass) -> None:
        if not self.manual.active:
            self.manual.begin(done)
            edited = self.manual.edited()
            # Without edits one guard is enough to tell a micro-batch from a step.
            self._arming.guard(dict.fromkeys(edited or done.order[:1], bool(edited)))
        try:
            self.manual.after(done)
        finally:
            if done.continued:
                self._traps.done(self._state.clocks.common)

    def _feeds_a_parameter(self, done: Pass) -> bool:
        """Tell whether an update can follow a pass; of one by hand, say once that it cannot."""
        if done.order:
            return True
        params = self._state.targets.params()
        if not any(param is not None and param.requires_grad for param in params):
            return True
        journal = self._state.journal
        # Asked once: to look for optimizers after each of many passes would be slow.
        if not (self.manual.declared or journal.said("no parameter")) and self._is_by_hand():
            text = (
                "a backward pass gave no gradient to any parameter (torch.autograd.grad, functional_call "
                f"with other tensors, inputs=): it counts as no step; {how_to_tick(self._state)} right before "
                "each update if the script updates other tensors in their place"
            )
            journal.once("no parameter", text, step=self._state.clocks.latest)
        return False

    def _rest(self, step: Step) -> Verdict:
        """Do nothing, but keep no other rank waiting."""
        clock = step.clock
        if self._agreement.is_missed(clock.tensors, update=True):
            silent, agenda = self._state.silent(), self._state.agenda(clock)
            finals = Finals(silent, {*agenda.judged, *agenda.stepped}, step.scale)
            Traps(silent, self._agreement).measure(clock, finals)
            StepEdits(silent).run(clock, finals, step.scale, acting=False)
        return self._traps.rest(clock)

    def _is_idle(self, clock: Clock) -> bool:
        """Tell whether nothing is due for a clock, by the rules alone: so it is on all ranks."""
        program = self._state.program
        if program.modules or program.tags or clock is self._state.clocks.common:
            return False
        return not self._state.agenda(clock).lanes

    def _catch_up(self, step: Step) -> None:
        """Look at gradients that came before the hooks; say where none came through them.

        Sharding a model after `apply` replaces all of its parameters; and a session can begin between
        a backward pass and the update that it feeds.
        """
        clock = step.clock
        if clock.passes or self.manual.active:
            return
        early, self._early = self._early, set()
        having, _ = self._state.targets.grads(clock.tensors)
        late = early.union(self.model.rearm())
        if not late.isdisjoint(having):
            # A fused optimizer gets them with the scale, any other without.
            done = Pass(order=having, scale=step.scale)
            for owner, look in after_pass(self._state, done).items():
                self._traps.saw(owner, look)
        elif having:
            tell_of_no_pass(self._state, clock, having)

    def _lead_common(self, clock: Clock) -> None:
        """Let what no optimizer owns go by the optimizer that is furthest."""
        clocks = self._state.clocks
        common = clocks.common
        if clock is common:
            # An optimizer that takes over from a hand-written update goes on with its count.
            clocks.start = clock.step
        elif common.step < clock.step:
            if not self._state.paused:
                notice_silence(self._state, common, self._module_clocks.of, owned=self.steps.owned)
            self._traps.done(common)
            common.step = clock.step

    def _tell_of_unowned(self) -> None:
        """Say what no optimizer updates, after a last search for one that has not stepped yet."""
        params = [self._state.targets.param(tensor) for tensor in self.model.unowned()]
        if params:
            self.steps.search(param for param in params if param is not None)
            tell_of_unowned(self._state, self.model.unowned())
