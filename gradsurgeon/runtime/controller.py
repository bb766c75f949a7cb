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
from gradsurgeon.runtime.accumulated_rules import after_pass
from gradsurgeon.runtime.activation_rules import ActivationRules
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.hook_registry import HookRegistry
from gradsurgeon.runtime.manual_steps import ManualSteps, how_to_tick
from gradsurgeon.runtime.model_changes import ModelChanges
from gradsurgeon.runtime.module_hooks import ModuleHooks
from gradsurgeon.runtime.module_schedule import ModuleCounters
from gradsurgeon.runtime.nan_trap import NanTraps
from gradsurgeon.runtime.notices import count_passes, warn_of_missing_pass, warn_of_unowned_params
from gradsurgeon.runtime.optimizer_watch import OptimizerWatch
from gradsurgeon.runtime.optimizers import why_not_met
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.runtime.scaler_watch import refuse_scaling
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.step_decision import StepDecision
from gradsurgeon.runtime.step_rules import StepRules
from gradsurgeon.runtime.tensor_hooks import TensorHooks
from gradsurgeon.runtime.training_events import BackwardPass, Step
from gradsurgeon.runtime.unfired_rules import count_due_rules

# By then the optimizers of most scripts have stepped; others are looked for.
_SETTLED = 3


class Controller:
    """Puts the hooks of a session on and off, and receives the events of training in between.

    Args:
        model: reached weakly.
        context: what the rules may use while they act.
        plan: what the program was made of.
        optimizers: those the caller has named, ``None`` to look for them, empty where weights are
            updated by hand.
        provisional: whether an optimizer is going to update the model is not known yet.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Context,
        plan: Plan,
        optimizers: Sequence[Optimizer] | None,
        *,
        provisional: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self._context = context
        self._agreement = RankAgreement(context)
        self._traps = NanTraps(context, self._agreement)
        self._edits = StepRules(context)
        self._backward = BackwardWatch(self, context.scaling)
        declared = optimizers is not None and not optimizers
        self.manual = ManualSteps(context, self, declared=declared, provisional=provisional)
        self._param_hooks = HookRegistry(context, self._backward, self.manual)
        self._module_counters = ModuleCounters(context.counters, context.program.names)
        self.tensor_hooks = TensorHooks(
            ActivationRules(context, self._backward, self._module_counters)
        )
        self._module_hooks = ModuleHooks(context.program.modules, self.tensor_hooks)
        self.model = ModelChanges(model, context, plan, self._param_hooks, self._module_hooks)
        self.steps = OptimizerWatch(context, self, self.model)
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
            self._early = set(
                self._context.parameters.grads(range(len(self._context.parameters)))[0]
            )
            self._param_hooks.arm()
            self._module_hooks.refresh(named_modules(self._model()))
            for optimizer in self._given:
                if self.steps.meet(optimizer) is None:
                    self._context.event_log.emit("notice", why_not_met(optimizer), warn=True)
        except BaseException:
            self.detach()
            raise
        self._given.clear()
        self.attached = True

    def go_last(self) -> None:
        """Put the hooks on anew, so that they come after those of another session."""
        self._param_hooks.again()
        self._module_hooks.detach()
        self._module_hooks.refresh(named_modules(self._model()))

    def detach(self) -> None:
        self.attached = False
        self.steps.close()
        self._module_hooks.detach()
        self._param_hooks.disarm()
        self._context.parameters.forget()
        self._context.paused = True

    def backward_started(self) -> None:
        """Take notice of a backward pass.

        Raises:
            GradSurgeonError: the ranks may take different numbers of steps.
            BindError: a rule cannot act under loss scaling.
        """
        self.steps.end_failed()
        self._context.ranks.backward_started()
        if self._context.scaling.scale is not None and not self._context.paused:
            refuse_scaling(self._context.program)

    def backward_finished(self, done: BackwardPass) -> None:
        """Measure what a backward pass has left, and take the step of scripts that update by hand."""
        context = self._context
        self._agreement.find_sessions(done.order, update=False)
        if context.paused:
            if self._agreement.is_needed_by_others(done.order, update=False):
                after_pass(context.silent(), done)
            return
        self._arrived(done)
        self.manual.check_accumulation(done)
        # Whose step this pass feeds decides which clock its records go by.
        by_hand = self._feeds_a_parameter(done) and self._is_by_hand()
        with self.manual.step_of(done):
            for counter, snapshot in after_pass(context, done).items():
                self._traps.add_snapshot(counter, snapshot)
        count_passes(context, done)
        if by_hand:
            self._step_by_hand(done)

    def step_starting(self, step: Step) -> StepDecision:
        """Do what is due right before an update: the trap decides, then rules at the step edit."""
        context, counter = self._context, step.counter
        if step.inside:
            if context.paused:
                return StepDecision()
            # By the end of the pass the script has cleared this gradient.
            having, _ = context.parameters.grads(counter.tensors)
            after_pass(context, BackwardPass(order=having, scale=context.scaling.scale))
        else:
            self._backward.settle(step.scale)
            if self._is_idle(counter):
                return StepDecision()
            self._agreement.find_sessions(counter.tensors, update=True)
            if self._agreement.is_paused_anywhere(counter.tensors):
                return self._rest(step)
            self._catch_up(step)
        due_rules = context.due_rules(counter)
        gradients = Gradients(context, due_rules.final, step.scale)
        # The trap judges what the script hands over: a rule that repairs it is no reason to go on.
        decision = self._traps.decide(counter, gradients)
        stopped = decision.skip or decision.error is not None
        suspicious = self._edits.run(counter, gradients, acting=not stopped)
        # By the rules alone, which are those of all ranks: they decide together.
        if (
            not stopped
            and due_rules.traps
            and any(bound_rule.rule.may_overflow for bound_rule in due_rules.at_step)
        ):
            decision = self._traps.decide_edited(counter, suspicious)
        if context.mode == "act":
            decision = replace(decision, frozen=tuple(sorted(due_rules.frozen)))
        return decision

    def step_finished(self, step: Step, *, took_place: bool) -> None:
        """Count an attempted update, and look after what it showed."""
        counter, context = step.counter, self._context
        if took_place and not context.paused:
            count_due_rules(context, counter, self._module_counters.of, owned=self.steps.owned)
            if not step.inside:  # the hooks on this very gradient may still be running
                self.model.after_step(counter)
        self._traps.done(counter)
        if not step.inside:
            context.scaling.stepped()
        self.tensor_hooks.missed(counter)
        counter.tick()
        self._unstepped = False
        self._steps += 1
        if self._steps == _SETTLED and self.steps.owned and not context.paused:
            self._tell_of_unowned()
        context.recorder.end_step()
        self._lead_common(counter)

    def step_skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Count an update that a scaler has skipped for overflow.

        Raises:
            NonFiniteGradientError: too many in a row, or the scale has come down to nothing.
        """
        try:
            self._backward.settle(None)
            self._traps.skipped_by_scaler(counter, scale)
        finally:
            self._context.flags.forget(counter)
            # No rule at the step point could fire in a step that did not take place.
            self.step_finished(Step(counter), took_place=False)

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
        self._context.scaling.scaled(scaler, losses)

    @contextmanager
    def scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> Iterator[None]:
        """Find out whether a scaler that is to step an optimizer skips the step for overflow."""
        begun = self.steps.begun(optimizer)
        with self._context.scaling.steps(scaler, optimizer) as news:
            yield
            if news and self.attached:
                owner, scale = self.steps.meet(optimizer), self._context.scaling.stepping(optimizer)
                if owner is not None and owner.begun == begun and scale is not None:
                    self.step_skipped_by_scaler(owner.counter, scale)

    def step_after(self, others: Sequence[Controller], optimizer: Optimizer) -> None:
        """Let the rules at the step of an optimizer act after those of other sessions."""
        newest = self.steps.newest_hook(optimizer)
        if newest >= 0 and any(other.steps.newest_hook(optimizer) > newest for other in others):
            self.steps.go_last(optimizer)

    @property
    def tag_rules(self) -> tuple[Rule, ...]:
        return self._context.program.tags

    def why_never(self, *, due: bool) -> str:
        """Return why a rule has never fired by the time the session ends."""
        if due:
            return "was due and never fired"
        if self._unstepped:
            return "never fired: gradients came, but no optimizer that owns them ever stepped"
        if not self._steps:
            return "never fired: no gradient reached a parameter, and nothing was updated"
        return "was never due"

    def _arrived(self, done: BackwardPass) -> None:
        self._unstepped |= bool(done.order)
        self._early.clear()
        self.model.arrived(done.order)
        self._edits.arrived(done.order)
        self._context.flags.passed()

    def _is_by_hand(self) -> bool:
        return self.manual.active or not self.expects_update()

    def _step_by_hand(self, done: BackwardPass) -> None:
        if not self.manual.active:
            self.manual.begin(done)
            edited = self.manual.edited()
            # Without edits one guard is enough to tell a micro-batch from a step.
            self._param_hooks.guard(dict.fromkeys(edited or done.order[:1], bool(edited)))
        try:
            self.manual.after(done)
        finally:
            if done.continued:
                self._traps.done(self._context.counters.common)

    def _feeds_a_parameter(self, done: BackwardPass) -> bool:
        """Tell whether an update can follow a pass; of one by hand, say once that it cannot."""
        if done.order:
            return True
        params = self._context.parameters.params()
        if not any(param is not None and param.requires_grad for param in params):
            return True
        event_log = self._context.event_log
        # Asked once: to look for optimizers after each of many passes would be slow.
        if not (self.manual.declared or event_log.said("no parameter")) and self._is_by_hand():
            text = (
                "a backward pass gave no gradient to any parameter (torch.autograd.grad, functional_call "
                f"with other tensors, inputs=): it counts as no step; {how_to_tick(self._context)} right before "
                "each update if the script updates other tensors in their place"
            )
            event_log.once("no parameter", text, step=self._context.counters.latest)
        return False

    def _rest(self, step: Step) -> StepDecision:
        """Do nothing, but keep no other rank waiting."""
        counter = step.counter
        if self._agreement.is_needed_by_others(counter.tensors, update=True):
            silent, due_rules = self._context.silent(), self._context.due_rules(counter)
            gradients = Gradients(silent, due_rules.final, step.scale)
            NanTraps(silent, self._agreement).measure(counter, gradients)
            StepRules(silent).run(counter, gradients, acting=False)
        return self._traps.rest(counter)

    def _is_idle(self, counter: StepCounter) -> bool:
        """Tell whether nothing is due for a clock, by the rules alone: so it is on all ranks."""
        program = self._context.program
        if program.modules or program.tags or counter is self._context.counters.common:
            return False
        return not self._context.due_rules(counter).bound_rules

    def _catch_up(self, step: Step) -> None:
        """Look at gradients that came before the hooks; say where none came through them.

        Sharding a model after `apply` replaces all of its parameters; and a session can begin between
        a backward pass and the update that it feeds.
        """
        counter = step.counter
        if counter.passes or self.manual.active:
            return
        early, self._early = self._early, set()
        having, _ = self._context.parameters.grads(counter.tensors)
        late = early.union(self.model.rearm())
        if not late.isdisjoint(having):
            # A fused optimizer gets them with the scale, any other without.
            done = BackwardPass(order=having, scale=step.scale)
            for owner, snapshot in after_pass(self._context, done).items():
                self._traps.add_snapshot(owner, snapshot)
        elif having:
            warn_of_missing_pass(self._context, counter, having)

    def _lead_common(self, counter: StepCounter) -> None:
        """Let what no optimizer owns go by the optimizer that is furthest."""
        counters = self._context.counters
        common = counters.common
        if counter is common:
            # An optimizer that takes over from a hand-written update goes on with its count.
            counters.start = counter.step
        elif common.step < counter.step:
            if not self._context.paused:
                count_due_rules(
                    self._context, common, self._module_counters.of, owned=self.steps.owned
                )
            self._traps.done(common)
            common.step = counter.step

    def _tell_of_unowned(self) -> None:
        """Say what no optimizer updates, after a last search for one that has not stepped yet."""
        params = [self._context.parameters.param(tensor) for tensor in self.model.unowned()]
        if params:
            self.steps.search(param for param in params if param is not None)
            warn_of_unowned_params(self._context, self.model.unowned())
