"""The moving parts of a session, wired: what calls what when a pass ends or a step begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon import _dist
from gradsurgeon.compiler import Program
from gradsurgeon.planning import ROOT, Plan, named_modules
from gradsurgeon.runtime.agreement import Agreement
from gradsurgeon.runtime.arming import Arming
from gradsurgeon.runtime.changes import Changes
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.edits import StepEdits
from gradsurgeon.runtime.final import Finals
from gradsurgeon.runtime.look import after_pass
from gradsurgeon.runtime.manual import Manual, how_to_tick
from gradsurgeon.runtime.modules import ModuleHooks
from gradsurgeon.runtime.notices import (
    count_passes,
    tell_of_no_pass,
    tell_of_unowned,
)
from gradsurgeon.runtime.optimizers import why_not_met
from gradsurgeon.runtime.passes import Pass, Passes
from gradsurgeon.runtime.scaling import refuse_scaling
from gradsurgeon.runtime.silence import notice_silence
from gradsurgeon.runtime.sites import Sites
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.stepping import Steps
from gradsurgeon.runtime.trap import Traps
from gradsurgeon.runtime.update import Update
from gradsurgeon.runtime.upkeep import Upkeep
from gradsurgeon.runtime.verdict import Verdict

# By then the optimizers of most scripts have stepped; others are looked for.
_SETTLED = 3


class Engine:
    """Runs the program of a session: hooks on, passes and steps as they come, hooks off.

    Args:
        model: reached weakly.
        state: what the parts share.
        plan: what the program was made of.
        rebind: binds the rules to the model as it is now, and raises where they cannot act.
        optimizers: those the caller has named, ``None`` to look for them, empty where weights are
            updated by hand.
    """

    def __init__(
        self,
        model: nn.Module,
        state: State,
        plan: Plan,
        rebind: Callable[[nn.Module], object],
        optimizers: Sequence[Optimizer] | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._rebind = rebind
        self._state = state
        self._agreement = Agreement(state)
        self._traps = Traps(state, self._agreement)
        self._edits = StepEdits(state)
        self._passes = Passes(
            self._backward_ended,
            waits=lambda: self.steps.owned or self._optimizers_known(),
            begins=self._pass_begins,
            scaling=state.scaling,
        )
        self.steps = Steps(
            state,
            judge=lambda update: self._judge(update.clock, update),
            finished=self._finished,
            first_owner=self._optimizer_appeared,
            new_params=self._look_at_model,
            scaled_away=self._scaled_away,
            recheck=self._check,
            gone=lambda: self._arming.keep_all(),  # noqa: PLW0108 # made below
        )
        declared = optimizers is not None and not optimizers
        self.manual = Manual(state, self._judge, self._finished, declared=declared)
        self._arming = Arming(state, self._passes)
        self.sites = Sites(state, self._passes, self._clock_of)
        self._module_hooks = ModuleHooks(self.sites)
        self._changes = Changes(model, state, plan, self._arming, self._module_hooks)
        self._upkeep = Upkeep(state, self._arming, self._changes, self._check)
        self._clock_places = _first_params(state.program)
        self._search_on = optimizers is None
        # Whether backward passes came and no update has followed yet.
        self.unstepped = False
        self._steps = 0
        # The tensors that had a gradient before the hooks went on.
        self._early: set[int] = set()
        # Named optimizers are met when the hooks go on; then they are held weakly.
        self._given = list(optimizers or ())

    def attach(self) -> None:
        """Put the hooks on; on failure nothing stays."""
        try:
            self._early = set(self._state.targets.grads(range(len(self._state.targets)))[0])
            self._arming.arm()
            self._module_hooks.attach(named_modules(self._model()))
            for optimizer in self._given:
                if self.steps.meet(optimizer) is None:
                    self._state.journal.emit("notice", why_not_met(optimizer), warn=True)
        except BaseException:
            self.detach()
            raise
        self._given.clear()

    def go_last(self) -> None:
        """Put the hooks on anew, so that they come after those of another session."""
        self._arming.again()
        self._module_hooks.detach()
        self._module_hooks.attach(named_modules(self._model()))

    def settle(self) -> None:
        """Note what the device has decided so far. Waits for it where there is something."""
        self._traps.settle()

    def detach(self) -> None:
        """Take all hooks off."""
        self.steps.close()
        self._module_hooks.detach()
        self._arming.disarm()
        self._state.targets.forget()
        self._state.paused = True

    def _clock_of(self, module: str) -> Clock:
        """Return the clock of the optimizer that owns a module: that of its first parameter."""
        place = self._clock_places.get(module, self._clock_places.get(ROOT))
        return self._state.clocks.common if place is None else self._state.clocks[place]

    def _backward_ended(self, done: Pass) -> None:
        self._agreement.gather(done.order, update=False)
        if self._state.paused:
            if self._agreement.is_missed(done.order, update=False):
                with self._state.muted():
                    after_pass(self._state, done)
            return
        self.unstepped |= bool(done.order)
        self._early.clear()
        self._upkeep.arrived(done.order)
        self._edits.arrived(done.order)
        self._state.flags.passed()
        self.manual.look_back(done)
        # Whose step this pass feeds decides which clock its records go by.
        by_hand = self._feeds_a_parameter(done) and self._is_by_hand()
        with self.manual.step_of(done):
            for clock, look in after_pass(self._state, done).items():
                self._traps.saw(clock, look)
        count_passes(self._state, done)
        if by_hand and not self.manual.active:
            self.manual.begin(done)
            edited = self.manual.edited()
            # Without edits one guard is enough to tell a micro-batch from a step.
            self._arming.guard(dict.fromkeys(edited or done.order[:1], bool(edited)))
        if by_hand:
            try:
                self.manual.after(done)
            finally:
                if done.continued:
                    self._traps.done(self._state.clocks.common)

    def _is_by_hand(self) -> bool:
        return self.manual.active or not (self.steps.owned or self._optimizers_known())

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

    def _check(self) -> None:
        """Raise where the rules cannot act on the model as it is now."""
        if (model := self._model()) is not None:
            self._rebind(model)

    def _optimizers_known(self) -> bool:
        """Tell whether some optimizer updates the model; it may have been made after `apply`."""
        if self._search_on:
            model = self._model()
            if model is not None and self.steps.search(model.parameters()):
                self._search_on = False
        return not self._search_on

    def _optimizer_appeared(self) -> None:
        """Take back a step that was counted for want of an optimizer, which now takes it."""
        edited = self.manual.withdraw()
        self._edits.spare(edited)

    def _judge(self, clock: Clock, update: Update | None = None) -> Verdict:
        """Do what is due right before an update.

        Args:
            clock: of the update.
            update: the call of the optimizer; ``None`` where weights are updated by hand.
        """
        state = self._state
        scale = None if update is None else update.scale
        if update is not None and update.inside:
            if state.paused:
                return Verdict()
            # By the end of the pass the script has cleared this gradient.
            having, _ = state.targets.grads(clock.tensors)
            after_pass(state, Pass(order=having, scale=state.scaling.scale))
        else:
            self._passes.settle(scale)
            if self._is_idle(clock):
                return Verdict()
            self._agreement.gather(clock.tensors, update=True)
            if self._agreement.rests(clock.tensors):
                return self._rest(clock, scale)
            self._catch_up(clock, scale)
        agenda = state.agenda(clock)
        finals = Finals(state, {*agenda.trapped, *agenda.stepped}, scale)
        # The trap judges what the script hands over: a rule that repairs it is no reason to go on.
        if update is not None and update.flaggable:
            deferred = self._traps.defer(clock, finals)
            if deferred is not None:
                self._edits.run(clock, finals, scale, acting=deferred.error is None)
                return deferred
        verdict = self._traps.decide(clock, finals)
        stopped = verdict.skip or verdict.error is not None
        suspicious = self._edits.run(clock, finals, scale, acting=not stopped)
        # By the rules alone, which are those of all ranks: they decide together.
        if not stopped and agenda.traps and any(lane.rule.may_overflow for lane in agenda.at_step):
            verdict = self._traps.decide_edited(clock, suspicious)
        if state.mode == "act":
            verdict = replace(verdict, frozen=tuple(sorted(agenda.frozen)))
        return verdict

    def _rest(self, clock: Clock, scale: Tensor | None) -> Verdict:
        """Do nothing, but keep no other rank waiting."""
        if self._agreement.is_missed(clock.tensors, update=True):
            agenda = self._state.agenda(clock)
            finals = Finals(self._state, {*agenda.trapped, *agenda.stepped}, scale)
            with self._state.muted():
                Traps(self._state, self._agreement).measure(clock, finals)
                self._edits.run(clock, finals, scale, acting=False)
        return self._traps.rest(clock)

    def _is_idle(self, clock: Clock) -> bool:
        """Tell whether nothing is due for a clock, whose hooks are off then."""
        program = self._state.program
        if program.modules or program.tags or clock is self._state.clocks.common:
            return False
        return not self._state.agenda(clock).lanes

    def _catch_up(self, clock: Clock, scale: Tensor | None) -> None:
        """Look at gradients that came before the hooks; say where none came through them.

        Sharding a model after `apply` replaces all of its parameters; and a session can begin between
        a backward pass and the update that it feeds.
        """
        if clock.passes or self.manual.active:
            return
        early, self._early = self._early, set()
        having, _ = self._state.targets.grads(clock.tensors)
        late = early.union(self._upkeep.rearm())
        if not late.isdisjoint(having):
            # A fused optimizer gets them with the scale, any other without.
            for owner, look in after_pass(self._state, Pass(order=having, scale=scale)).items():
                self._traps.saw(owner, look)
        elif having and self._arming.on(clock):
            tell_of_no_pass(self._state, clock, having)

    def _pass_begins(self) -> None:
        """Take notice of a backward pass.

        Raises:
            GradSurgeonError: the ranks may take different numbers of steps.
            BindError: a rule cannot act under loss scaling.
        """
        self.steps.end_failed()
        self._state.ranks.look_around()
        if self._state.scaling.scale is not None and not self._state.paused:
            refuse_scaling(self._state.program)

    def scaler_stepped(self, optimizer: Optimizer, begun: int) -> None:
        """Count the step of an optimizer that its scaler has skipped for overflow.

        Args:
            optimizer: the one that the scaler was to step.
            begun: how many steps it had begun before.
        """
        owner, scale = self.steps.meet(optimizer), self._state.scaling.stepping(optimizer)
        if owner is not None and owner.begun == begun and scale is not None:
            self._scaled_away(owner.clock, scale)

    def _scaled_away(self, clock: Clock, scale: Tensor) -> None:
        try:
            self._passes.settle(None)
            self._traps.scaled_away(clock, scale)
        finally:
            self._state.flags.forget(clock)
            # No rule at the step point could fire in a step that did not take place.
            self._finished(clock, took_place=False)

    def _finished(self, clock: Clock, *, took_place: bool = True, inside: bool = False) -> None:
        """Count an attempted update, and look after what it showed."""
        if took_place and not self._state.paused:
            notice_silence(self._state, clock, self._clock_of, owned=self.steps.owned)
            if not inside:  # the hooks on this very gradient may still be running
                self._upkeep.look(clock, idle=self._is_idle(clock))
        self._traps.done(clock)
        if not inside:
            self._state.scaling.stepped()
        self.sites.missed(clock)
        clock.tick()
        if clock is not self._state.clocks.common and not inside:
            self._arming.keep(clock, self._state.agenda(clock).hooked)
        self.unstepped = False
        self._steps += 1
        if self._steps == _SETTLED and self.steps.owned and not self._state.paused:
            self._tell_of_unowned()
        self._state.recorder.end_step()
        common = self._state.clocks.common
        if clock is common:
            # An optimizer that takes over from a hand-written update goes on with its count.
            self._state.clocks.start = clock.step
        elif common.step < clock.step:
            # What no optimizer owns goes by the one that is furthest.
            if not self._state.paused:
                notice_silence(self._state, common, self._clock_of, owned=self.steps.owned)
            self._traps.done(common)
            common.step = clock.step

    def _tell_of_unowned(self) -> None:
        """Say what no optimizer updates, after a last search for one that has not stepped yet."""
        params = [self._state.targets.param(tensor) for tensor in self._upkeep.unowned()]
        if params:
            self.steps.search(param for param in params if param is not None)
            tell_of_unowned(self._state, self._upkeep.unowned())

    def why_never(self, *, due: bool) -> str:
        """Return why a rule has never fired by the time the session ends."""
        if due:
            return "was due and never fired"
        if self.unstepped:
            return "never fired: gradients came, but no optimizer that owns them ever stepped"
        if not self._steps:
            return "never fired: no gradient reached a parameter, and nothing was updated"
        return "was never due"

    def _look_at_model(self) -> None:
        """Find the parameters of the program again, where there is reason to believe they moved."""
        if self._model() is not None:
            self._upkeep.find_again()

    def knows(self, module: nn.Module) -> bool:
        """Tell whether a module is part of the model, as it was looked at last."""
        return self._changes.knows(module)

    def model_changed(self) -> None:
        """Put hooks on what has been exchanged, before a forward pass goes through it."""
        params = self._state.targets.params()
        # Between its passes a sharded model has other parameters than when it steps.
        if not any(param is not None and _dist.is_sharded(param) for param in params):
            self._upkeep.find_again(at_once=True)
            self._upkeep.tell_swapped()

    def swapped(self, tensors: Sequence[Tensor]) -> None:
        """Take notice of tensors whose contents were exchanged."""
        self._upkeep.swapped(tensors)

    def say_what_changed(self) -> None:
        """Note what of the model went unnoticed until the session ends."""
        self._changes.look(closing=True)


def _first_params(program: Program) -> dict[str, int]:
    """Return, per module that holds parameters, the index of the first of them."""
    places: dict[str, int] = {}
    for index, name in enumerate(program.names):
        places.setdefault(ROOT, index)
        parts = name.split(".")
        for depth in range(1, len(parts)):
            places.setdefault(".".join(parts[:depth]), index)
    return places
