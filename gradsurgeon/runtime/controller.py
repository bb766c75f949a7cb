"""The controller of a session: runs its parts in order when a pass ends or a step begins."""

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon.distributed.replication import Replication
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.language.planning import Plan, named_modules
from gradsurgeon.runtime.activation_rules import ActivationRules
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.check_effects import CheckEffect, model_of
from gradsurgeon.runtime.context import Context, SessionOptions
from gradsurgeon.runtime.device_outcome import DeviceOutcome
from gradsurgeon.runtime.effect import WeightUpdate
from gradsurgeon.runtime.effect_table import effects_of
from gradsurgeon.runtime.loss_rules import LossRules
from gradsurgeon.runtime.manual_steps import ManualSteps
from gradsurgeon.runtime.model_changes import ModelChanges
from gradsurgeon.runtime.module_hooks import ModuleHooks
from gradsurgeon.runtime.notices import Notices
from gradsurgeon.runtime.optimizer_watch import OptimizerWatch
from gradsurgeon.runtime.optimizers import unmet
from gradsurgeon.runtime.param_hooks import ParamHooks
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.runtime.scaler_watch import refuse_scaling
from gradsurgeon.runtime.shared_inputs import SharedInputs
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training import Training


class Controller:
    def __init__(
        self, model: nn.Module, context: Context, plan: Plan, options: SessionOptions
    ) -> None:
        self._model = weakref.ref(model)
        self.context = context
        self.kept = KeptCalls(lambda: context.paused)
        self.effects = effects_of(context, plan)
        self._replication = Replication(
            context.names, lambda: context.ranks, context.parameters.params
        )
        self._checks = [effect for effect in self.effects.all if isinstance(effect, CheckEffect)]
        if self._checks:
            known = model_of(model, context)
            for check in self._checks:
                check.know(known, self.kept, self._replication)
        self._agreement = RankAgreement(context, self.effects)
        self.training = Training(context, self.effects, self.kept, self._agreement)
        self.losses = LossRules(context, self._agreement, self.effects)
        self.backward = BackwardWatch(
            self.training, self.backward_finished, self.indices_that_matter
        )
        self.manual = ManualSteps(self.training, self.step_finished, options)
        self.param_hooks = ParamHooks(context, self.backward, self.effects)
        self.activations = ActivationRules(context, self.backward, self.effects)
        shared = SharedInputs(self.activations, self.effects)
        self._module_hooks = ModuleHooks(self.effects.modules, self.activations, shared)
        self.model = ModelChanges(model, plan, self.effects, self.param_hooks, self._module_hooks)
        self.steps = OptimizerWatch(self.training, self.step_finished, self.model, self.manual)
        self._notices = Notices(context, self.effects)
        self._search_on = options.optimizers is None
        self._unstepped = False  # a backward pass came, and no update followed it yet
        # Attempted updates.
        self.updates = 0
        # The last backward pass whose gradients an engine collects.
        self._collected: BackwardPass | None = None
        self._given = list(options.optimizers or ())
        self.attached = False
        context.refusals.at_last(self.steps.end_all)
        context.refusals.at_last(self._agreement.close)

    def attach(self) -> None:
        self.context.meet_ranks()
        self.param_hooks.arm()
        self._module_hooks.refresh(named_modules(self._model()))
        model = self._model()
        if model is not None and self.training.traps.keeps_calls:
            self.kept.attach(model)
        for text in unmet(self._given, self.steps.meet):
            self.context.event_log.emit("notice", text, warn=True)
        self.attached = True

    def go_last(self) -> None:
        self.param_hooks.arm()
        model = self._model()
        if model is not None:
            self._module_hooks.detach()
            self._module_hooks.refresh(named_modules(model))

    def detach(self) -> None:
        self.attached = False
        self.training.device.close()
        self._agreement.close()
        self.model.let_go()
        self.steps.close()
        self.effects.close()
        self._module_hooks.detach()
        self.kept.close()
        self.param_hooks.disarm()
        self.context.parameters.forget()
        self.context.is_paused = True

    def backward_finished(self, done: BackwardPass) -> None:
        if self.context.parameters.elsewhere is not None:
            # An engine adds the gradients to earlier ones, outside of `.grad`.
            done = replace(done, had=frozenset(done.indices))
            self._collected = done
            self._note_pass(done)
            self.training.note_pass(done)
            self._end_pass(done)
            return
        objections: list[Objection] = []
        try:
            self._agreement.find_sessions(done)
            by_hand = self._note_pass(done)
            if by_hand:
                self.manual.refuse_compounding(done)
            self.training.note_pass(done)
            self._show(done, objections)
            self._end_pass(done)
        finally:
            # Other ranks may wait for the vote.
            self._agreement.cast(done, objections)
        if by_hand:
            self.manual.after_pass()

    def _show(self, done: BackwardPass, objections: list[Objection]) -> None:
        """Show the gradients that feed an update; add this rank's objections."""
        self.training.act_after_pass(done)
        if self._agreement.voting(done):
            objections.extend(self.training.traps.objections(done))

    def show_collected(self, counter: StepCounter, scale: Tensor | None) -> None:
        """Show the gradients that an engine has collected, right before its update."""
        if self._collected is None:
            return
        reached = dict.fromkeys((*self._collected.indices, *counter.indices))
        done = replace(self._collected, indices=tuple(reached), scale=scale)
        self._collected = None
        objections: list[Objection] = []
        try:
            self._agreement.find_sessions(done)
            self._show(done, objections)
        finally:
            # On an overflow of scaled gradients, the engine itself agrees with all ranks.
            if scale is None:
                self._agreement.cast(done, objections)

    def _note_pass(self, done: BackwardPass) -> bool:
        """Note which gradients came; return whether the pass counts as a manual step."""
        context = self.context
        if context.ranks.are_several and context.ranks.shard_groups(done.indices):
            context.recorder.shared.passes += 1
        if done.scale is not None:
            refuse_scaling(self.effects.before_scaler)
        self._unstepped |= bool(done.indices)
        self._notices.arrived.update(done.indices)
        # A pass that gave no parameter a gradient feeds no update.
        if not done.indices and any(param.requires_grad for param in context.parameters.present()):
            return False
        return self.manual.active or not self.expects_update()

    def _end_pass(self, done: BackwardPass) -> None:
        if self._checks and self.context.reaches_ranks:
            self._replication.passed(done.indices, done.averaging)
        self.training.after_pass(done)
        for counter in self.context.counters.among(done.indices):
            counter.passes += 1
        self._notices.passed(done)
        if self.losses.effects:
            self.losses.passed(done.indices)
        self.kept.reaching += 1

    def step_finished(self, step: WeightUpdate) -> None:
        """Count an attempted update."""
        context = self.context
        counter = step.counter
        if step.overflowed is not None:
            # The step does not take place, so no rule at `step` can fire.
            update = WeightUpdate(counter, self.effects.due(counter), optimizer=step.optimizer)
            try:
                self.training.traps.skipped_by_scaler(update, step.overflowed)
            finally:
                self.step_finished(update)
            return
        step.took_place = step.returned and not step.stopped
        if step.returned and (step.outcome is None or step.outcome.overflow is None):
            counter.scaler_skips = 0
        self.training.after_update(step)
        self.training.traps.passes.forget(counter)
        if self._checks and context.reaches_ranks:
            self._replication.updated(counter.indices)
        if step.took_place:
            self._count_due(counter, step.outcome)
        if step.returned and not step.inside:
            # Inside backward, hooks on a gradient may still be running.
            self.model.after_step(counter)
            self._notices.arrived.difference_update(counter.indices)
        if self.effects.sites:
            self.activations.missed(counter)
        counter.tick()
        self.kept.updated()
        self.updates += 1
        self._lead_common(counter)
        if self._unstepped and self._notices.arrived and self.steps.owned:
            settled = self._notices.newly_unowned()
            if settled:
                # A last search for optimizers that have not stepped yet.
                self.steps.search(context.parameters.present(settled))
            self._notices.warn_of_unowned()
        self._unstepped = False
        context.recorder.end_step(raised=step.raised)

    def _count_due(self, counter: StepCounter, outcome: DeviceOutcome | None = None) -> None:
        if self.context.event_log.silent:
            self._notices.count_due(counter, outcome, owned=self.steps.owned)

    def _lead_common(self, counter: StepCounter) -> None:
        """Make the common counter, used by unowned parameters, follow the most advanced step counter."""
        counters = self.context.counters
        common = counters.common
        if counter is common:
            # An optimizer that takes over from manual updates continues their count.
            counters.start = counter.step
        elif common.step < counter.step:
            self._count_due(common)
            if common.indices:
                self.training.traps.passes.forget(common)
            common.step = counter.step

    def indices_that_matter(self, held: Mapping[int, Tensor]) -> Collection[int]:
        """Return the tensors whose held gradients distinguish a micro-batch from a step, and a sum from its addends."""
        matter = self._notices.awaits_sum(held)
        if not self.steps.owned and not self.manual.declared:
            matter += [index for index in self.manual.edited() if index in held]
        return matter

    def expects_update(self) -> bool:
        """Return whether an optimizer is going to step; search for one as long as none is known."""
        if self._search_on and not self.steps.owned:
            self._search_on = not self.steps.search(self.model.params())
        return not self._search_on or self.steps.owned

    @contextmanager
    def scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> Iterator[None]:
        """Detect, around a scaler's step of an optimizer, whether the scaler skips it for overflow."""
        guard = self.context.refusals
        with self.context.scaling.steps(scaler, optimizer) as is_outer:
            owner = None
            before = -1
            with guard:
                if is_outer:
                    owner = self.steps.meet(optimizer)
                if owner is not None:
                    before = owner.counter.step
                    self.training.before_unscaling(owner.counter, optimizer, scaler)
            yield
            with guard:
                if owner is not None and owner.counter.step == before and self.attached:
                    scale = self.context.scaling.scale_of_step(optimizer)
                    if scale is not None:
                        stepping = weakref.ref(optimizer)
                        skipped = WeightUpdate(owner.counter, optimizer=stepping, overflowed=scale)
                        self.step_finished(skipped)
        if self.context.event_log.raised:
            self.context.event_log.raise_raised()

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient came, or an optimizer stepped."""
        return self._unstepped or self.updates > 0

    @property
    def is_idle(self) -> bool:
        """Whether gradients came, and an optimizer that owns parameters never stepped."""
        return self._unstepped and not self.updates and self.steps.owned
