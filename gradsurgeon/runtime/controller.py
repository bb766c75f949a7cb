"""The controller of a session: runs its parts in order when a pass ends or a step begins."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon.distributed.ranks import FINE
from gradsurgeon.distributed.votes import Objection
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.planning import Plan, named_modules
from gradsurgeon.runtime.activation_rules import ActivationRules, ModuleCounters
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.checks import Checks
from gradsurgeon.runtime.conclusions import StepContext
from gradsurgeon.runtime.context import Context, Options
from gradsurgeon.runtime.due_rules import NOTHING_DUE, DueRules, StepCounter
from gradsurgeon.runtime.gradient_rules import act_on_contributions, after_pass, run_step_rules
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.loss_rules import LossRules
from gradsurgeon.runtime.manual_steps import NO_PARAMETER, ManualSteps, how_to_tick
from gradsurgeon.runtime.model_changes import ModelChanges
from gradsurgeon.runtime.module_hooks import ModuleHooks, TensorHooks
from gradsurgeon.runtime.notices import (
    SETTLED,
    UnownedParams,
    awaits_sum,
    count_due_rules,
    count_passes,
    warn_of_missing_pass,
    why_never,
)
from gradsurgeon.runtime.optimizer_watch import OptimizerWatch
from gradsurgeon.runtime.param_hooks import ParamHooks
from gradsurgeon.runtime.rank_agreement import ALONE, DecidesAlone, Heard, RankAgreement
from gradsurgeon.runtime.scaler_watch import refuse_scaling
from gradsurgeon.runtime.shared_inputs import SharedInputs
from gradsurgeon.runtime.spike_traps import SpikeTraps
from gradsurgeon.runtime.training_events import (
    GOES_ON,
    BackwardPass,
    Logged,
    Step,
    StepDecision,
)
from gradsurgeon.runtime.traps import Traps
from gradsurgeon.tensors.backward_graph import BackwardGraph

_NOT_MET = (
    "the optimizer {kind} holds no parameter of the model, or skips the constructor of "
    "torch.optim.Optimizer, so torch calls no hook when it steps: pass the optimizer that it wraps"
)


class Controller:
    def __init__(self, model: nn.Module, context: Context, plan: Plan, options: Options) -> None:
        self._model = weakref.ref(model)
        self._modules = weakref.WeakSet(model.modules())
        self.context = context
        self._together = RankAgreement(context)
        self._agreement: DecidesAlone = DecidesAlone(context)
        self._kept = KeptCalls(lambda: context.paused)
        self.spikes = SpikeTraps(context)
        self.checks = Checks(context, model)
        self.traps = Traps(context, self._kept, self.spikes)
        self.losses = LossRules(context, self._together)
        self.backward = BackwardWatch(context, self)
        self.manual = ManualSteps(context, self, options)
        self.param_hooks = ParamHooks(context, self.backward)
        self._module_counters = ModuleCounters(context.counters, context.program.names)
        sites = ActivationRules(context, self.backward, self._module_counters)
        self.tensor_hooks = TensorHooks(sites, SharedInputs(sites, self.losses.effects))
        self._module_hooks = ModuleHooks(context.program.modules, self.tensor_hooks)
        self.model = ModelChanges(model, context, plan, self.param_hooks, self._module_hooks)
        self.steps = OptimizerWatch(context, self, self.model)
        self._search_on = options.optimizers is None
        # Whether a backward pass came and no update followed it yet.
        self._unstepped = False
        self._steps = 0
        self._unowned = UnownedParams(context)
        # A parameter that the last pass reached, in a tuple; empty before the first pass.
        self._last: tuple[int, ...] = ()
        self._given = list(options.optimizers or ())
        self.attached = False

    def attach(self) -> None:
        self._meet_ranks()
        self.param_hooks.arm()
        self._module_hooks.refresh(named_modules(self._model()))
        if self.traps.keeps_calls and (model := self._model()) is not None:
            self._kept.attach(model)
        # Popped one by one: from here on the session holds the optimizers weakly.
        while self._given:
            optimizer = self._given.pop(0)
            if self.steps.meet(optimizer) is None:
                text = _NOT_MET.format(kind=type(optimizer).__name__)
                self.context.event_log.emit("notice", text, warn=True)
        self.attached = True

    def _meet_ranks(self) -> None:
        if self.context.meet_ranks():
            self._agreement = self._together

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the model, or the modules that outlived it."""
        return list(self._modules if (model := self._model()) is None else model.modules())

    def go_last(self) -> None:
        self.param_hooks.arm()
        if (model := self._model()) is not None:
            self._module_hooks.detach()
            self._module_hooks.refresh(named_modules(model))

    def detach(self) -> None:
        self.attached = False
        self._together.close()
        self.model.let_go()
        self.steps.close()
        self._module_hooks.detach()
        self._kept.detach()
        self.param_hooks.disarm()
        self.context.parameters.forget()
        self.context.paused = True

    def backward_started(self, graph: BackwardGraph, reached: Collection[int] | None) -> None:
        """Prepare for a backward pass: gradients that a failed step hid come back, and its loss is kept."""
        self._meet_ranks()
        self.steps.end_failed()
        self.checks.before_pass(graph)
        if reached is None or reached:
            with self._kept.spared():
                tensors = None if reached is None else sorted(reached)
                accumulates = bool(
                    self._kept.reaching and self.context.parameters.grads(tensors)[0]
                )
                self._kept.keep_loss(graph, accumulates=accumulates)

    def contributed(self, tensors: Sequence[int], logged: Logged) -> None:
        act_on_contributions(self.context, tensors, logged)

    def backward_finished(self, done: BackwardPass) -> None:
        objections: Sequence[Objection] = ()
        try:
            self.context.ranks.refuse_uneven()
            self._agreement.find_sessions(done)
            by_hand, accumulated = self._see(done)
            if self._agreement.votes(done):
                with self.manual.in_step(accumulated=accumulated):
                    objections = self.traps.objections(done)
        finally:
            # Always cast the vote: other ranks may wait for it.
            self._agreement.cast(done, objections)
        if by_hand:
            try:
                self.manual.after(accumulated=accumulated)
            finally:
                if accumulated:
                    self.traps.done(self.context.counters.common)

    def backward_failed(self, done: BackwardPass) -> None:
        self._agreement.cast(done, ())

    def _see(self, done: BackwardPass) -> tuple[bool, bool]:
        """Run rules on the gradients of a pass; return whether it is a manual step, and whether it continues one."""
        context = self.context
        if context.ranks.shard_groups(done.tensors):
            context.recorder.shared.passes += 1
        if done.scale is not None:
            refuse_scaling(context.program)
        self._unstepped |= bool(done.tensors)
        self._last = done.tensors[:1] or self._last
        self.model.arrived.update(done.tensors)
        context.flags.passed()
        # The records of a pass use the counter of the step that the pass feeds.
        by_hand = self._feeds_a_parameter(done) and (
            self.manual.active or not self.expects_update()
        )
        accumulated = by_hand and self.manual.accumulates(done)
        with self.manual.in_step(accumulated=accumulated):
            for counter, snapshot in after_pass(context, done).items():
                self.traps.add_snapshot(counter, snapshot)
        self.checks.after_pass(done)
        count_passes(context, done)
        self.losses.passed(done.tensors)
        self._kept.reaching += 1
        return by_hand, accumulated

    def step_starting(self, step: Step) -> StepDecision:
        """Run the due rules right before an update: the traps decide, then rules at `step` edit."""
        context, counter = self.context, step.counter
        self.checks.before_update(step)
        heard = ALONE if step.inside else self._agreement.heard(counter)
        due = context.by_counter.due(counter)
        # Another rank may have counted more or fewer updates, so its rules may be due and its trap may have voted.
        if not (step.inside or due.bound_rules or heard.severity > FINE) and self._is_idle(counter):
            return GOES_ON
        rests = self._agreement.rests(heard)
        if rests == context.paused:
            return self._act(step, heard, NOTHING_DUE if rests else due)
        with context.resting(rests=rests):
            return self._act(step, heard, NOTHING_DUE if rests else due)

    def _act(self, step: Step, heard: Heard, due: DueRules) -> StepDecision:
        if not step.inside:
            if self.context.paused:
                return self.traps.rest(step.counter, heard)
            self._agreement.check_norms(step.counter, due)
        self._catch_up(step)
        return self._judge(step, heard, due)

    def _judge(self, step: Step, heard: Heard, due: DueRules) -> StepDecision:
        context, counter = self.context, step.counter
        gradients = Gradients(context, due.final, step.scale)
        update = StepContext(counter, due, gradients, heard, step.overflow)
        # The trap judges the gradients that the script hands over: a rule that repairs one does not excuse it.
        decision = self.traps.decide(update)
        stopped = decision.skip or decision.error is not None
        suspicious = run_step_rules(context, self.spikes, update, acting=not stopped)
        # The condition depends on the rules alone, and all ranks have equal rules: they decide together.
        if due.judged_again and not stopped:
            decision = self.traps.decide_edited(update, suspicious)
        if decision.skip or decision.error is not None:
            self.spikes.forget(counter)
        if context.mode == "act" and due.frozen:
            decision = replace(decision, frozen=tuple(sorted(due.frozen)))
        return decision

    def step_finished(self, step: Step, *, took_place: bool) -> None:
        counter, context = step.counter, self.context
        self.checks.after_update(step, took_place=took_place and not step.skipped)
        if took_place:
            if context.spikes:
                self.spikes.update(counter)
            self._count_due_rules(counter)
            if (
                not step.inside
            ):  # a step inside backward: hooks on this gradient may still be running
                self.model.after_step(counter)
        if context.spikes:
            self.spikes.forget(counter)
        self.traps.done(counter)
        if context.program.modules or context.program.tags:
            self.tensor_hooks.missed(counter)
        counter.tick()
        self._kept.updated(lambda: step.inside or self._is_awaited())
        self._steps += 1
        self._lead_common(counter)
        # Once per pass, even if several optimizers step.
        if self._unstepped and self.model.arrived and self.steps.owned:
            self._tell_of_unowned()
        self._unstepped = False
        context.recorder.end_step()

    def step_skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        try:
            self.traps.skipped_by_scaler(counter, scale)
        finally:
            self.context.flags.forget(counter)
            # The step did not take place, so no rule at `step` could fire.
            self.step_finished(Step(counter), took_place=False)

    def tensors_that_matter(self, held: Mapping[int, Tensor]) -> Collection[int]:
        """Return the tensors whose held gradients distinguish a micro-batch from a step, and a sum from its addends."""
        matter = awaits_sum(self.context, held)
        if not (self.steps.owned or self.manual.declared):
            # If no rule edits at `step`, one tensor is enough.
            matter += [tensor for tensor in self.manual.edited() or self._last if tensor in held]
        return matter

    def expects_update(self) -> bool:
        if self.steps.owned:
            return True
        if self._search_on:
            model = self._model()
            survivors = (one for one in self.context.parameters.params() if one is not None)
            if self.steps.search(survivors if model is None else model.parameters()):
                self._search_on = False
        return not self._search_on

    def optimizer_found(self) -> None:
        """Hand the step count to the first optimizer: the last pass may have counted as a manual step."""
        self.manual.withdraw()

    @contextmanager
    def scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> Iterator[None]:
        """Detect, around a scaler's step of an optimizer, whether the scaler skips it for overflow."""
        begun = self.steps.begun(optimizer)
        with self.context.scaling.steps(scaler, optimizer) as news:
            if news and self.checks and (owner := self.steps.meet(optimizer)) is not None:
                self.checks.before_unscaling(owner.counter, optimizer, scaler)
            yield
            if news and self.attached:
                owner, scale = self.steps.meet(optimizer), self.context.scaling.stepping(optimizer)
                if owner is not None and owner.begun == begun and scale is not None:
                    self.step_skipped_by_scaler(owner.counter, scale)
        self.context.event_log.raise_raised()

    def why_never(self, due: int, cause: str) -> str:
        """Return the reason that the summary gives for a rule that never fired."""
        return why_never(due, cause, unstepped=self._unstepped, stepped=bool(self._steps))

    def _count_due_rules(self, counter: StepCounter) -> None:
        if self.context.event_log.silent:
            of, owned = self._module_counters.of, self.steps.owned
            count_due_rules(self.context, counter, of, owned=owned, arrived=self.model.arrived)

    def _feeds_a_parameter(self, done: BackwardPass) -> bool:
        """Return whether an update can follow a pass; if not, and updates are manual, emit a notice once."""
        if done.tensors:
            return True
        params = self.context.parameters.params()
        if not any(param is not None and param.requires_grad for param in params):
            return True
        event_log = self.context.event_log
        # Checked once: searching for optimizers after each of many passes would be slow.
        if not (self.manual.declared or event_log.is_noticed("no parameter")) and (
            self.manual.active or not self.expects_update()
        ):
            text = NO_PARAMETER.format(tick=how_to_tick(self.context))
            event_log.notice_once("no parameter", text, step=self.context.counters.latest)
        return False

    def _is_awaited(self) -> bool:
        """Return whether the passes of this step also feed another optimizer that has not stepped yet."""
        counters = self.context.counters
        everything = range(len(self.context.program.names))
        return any(
            counter.passes
            for counter in counters.among(everything)
            # After `SETTLED` steps, no optimizer updates the parameters of the common counter.
            if counter is not counters.common or self._steps < SETTLED
        )

    def _is_idle(self, counter: StepCounter) -> bool:
        """Return whether a counter without due rules has no flags of modules or tags to judge either."""
        program = self.context.program
        return not (program.modules or program.tags or counter is self.context.counters.common)

    def _catch_up(self, step: Step) -> None:
        """Measure gradients that came before the hooks were on; warn if no hook saw the gradients of this step."""
        # Sharding a model after `apply` replaces all its parameters. A session can also begin between a
        # backward pass and the update that the pass feeds.
        counter = step.counter
        if step.inside:
            # Measured now: the script clears this gradient before the pass ends.
            having, _ = self.context.parameters.grads(counter.tensors)
            after_pass(self.context, BackwardPass(tuple(having), scale=self.context.scaling.scale))
            return
        if counter.passes or self.manual.active:
            return
        having, _ = self.context.parameters.grads(counter.tensors)
        if having and not counter.begun:
            # A fused optimizer gets scaled gradients, any other optimizer gets unscaled gradients.
            done = BackwardPass(tuple(having), scale=step.scale)
            for owner, snapshot in after_pass(self.context, done).items():
                self.traps.add_snapshot(owner, snapshot)
        elif having:
            warn_of_missing_pass(self.context, counter, having)

    def _lead_common(self, counter: StepCounter) -> None:
        """Make the common counter, used by unowned parameters, follow the most advanced step counter."""
        counters = self.context.counters
        common = counters.common
        if counter is common:
            # An optimizer that takes over from manual updates continues their count.
            counters.start = counter.step
        elif common.step < counter.step:
            self._count_due_rules(common)
            self.traps.done(common)
            common.step = counter.step

    def _tell_of_unowned(self) -> None:
        """Report parameters without an optimizer, after a last search for optimizers that have not stepped yet."""
        if settled := self._unowned.add(self.model.unowned()):
            params = self.context.parameters.params(settled)
            self.steps.search(param for param in params if param is not None)
        self._unowned.tell(self.model.unowned())
