"""The moments of a training, downwards in the order of a step: each is one loop over the effects that are due."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradsurgeon.distributed.ranks import FINE, StopReason
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.device_decisions import DeviceDecisions
from gradsurgeon.runtime.device_outcome import when_judged
from gradsurgeon.runtime.effect import NOTHING_DUE, Due, WeightUpdate
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.passes import BackwardPass, GradientSnapshot
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.runtime.running_steps import end_failed, running
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.traps import Traps
from gradsurgeon.runtime.update import JudgedUpdate
from gradsurgeon.runtime.votes_heard import ALONE, Heard
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.backward_graph import BackwardGraph


class Training:
    """Shows the effects of a session what happens."""

    def __init__(
        self, context: Context, effects: Effects, kept: KeptCalls, agreement: RankAgreement
    ) -> None:
        self.context = context
        self.effects = effects
        self.agreement = agreement
        self._kept = kept
        self.traps = Traps(context, kept, effects)
        self.device = DeviceDecisions(context, effects, self.traps, kept)

    def backward_started(self, graph: BackwardGraph) -> None:
        """Prepare for a backward pass: gradients that a failed step hid come back, and its loss is kept."""
        self.context.meet_ranks()
        if running:
            end_failed()
        self._before_pass(graph)
        accumulates = False
        if self._kept.reaching and self._kept.step.calls:
            parameters = self.context.parameters
            # An engine keeps gradients elsewhere.
            accumulates = parameters.elsewhere is not None or bool(parameters.own_grads()[0])
        self._kept.keep_loss(graph, accumulates=accumulates)

    @_torch.without_grad
    def _before_pass(self, graph: BackwardGraph) -> None:
        for counter in self.context.counters.all:
            due = self.effects.due(counter)
            if due.records:
                self.context.curves.began(graph)
            for bound in due.before_pass:
                bound.effect.before_pass(graph, bound)

    def note_pass(self, done: BackwardPass) -> None:
        """Note a backward pass and its losses."""
        self.context.curves.passed(done)
        for trap in self.effects.tensor_traps:
            trap.note_pass()

    @_torch.without_grad
    def after_pass(self, done: BackwardPass) -> None:
        for counter in self.context.counters.all:
            for bound in self.effects.due(counter).after_pass:
                bound.effect.after_pass(done, bound)

    @_torch.without_grad
    def before_unscaling(
        self, counter: StepCounter, optimizer: Optimizer, scaler: GradScaler
    ) -> None:
        """Show gradients that a `GradScaler` is about to unscale, because the script has not."""
        due = self.effects.due(counter)
        states = scaler._per_optimizer_states  # noqa: SLF001 # no public name tells
        if due.before_unscaling and states[id(optimizer)]["stage"] is OptState.READY:
            update = WeightUpdate(counter, due, optimizer=weakref.ref(optimizer))
            for bound in due.before_unscaling:
                bound.effect.before_unscaling(update, bound, scaler.get_scale())

    def find_due(self, update: WeightUpdate) -> None:
        """Set the rules that are due in an update, and the parameters that they hide from the optimizer."""
        update.due = self.effects.due(update.counter)
        if self.context.acts:
            update.hidden_by = update.due.hidden_by

    def step_starting(self, update: WeightUpdate) -> StopReason | None:
        """Act right before an update, with traps and then with rules at `step`; return why weights stay as they are, if they do."""
        context = self.context
        counter = update.counter
        if update.due is NOTHING_DUE or context.is_paused:
            self.find_due(update)
        due = update.due
        if update.unread is None:
            self._before_update(update)
        heard = ALONE
        asks_ranks = context.ranks.are_several and not update.inside
        if asks_ranks:
            heard = self.agreement.heard(counter, is_voted_on=update.is_voted_on)
        # Without due rules, flags of modules or tags may remain to be judged.
        may_have_flags = update.inside or self.effects.sites or counter is context.counters.common
        is_idle = not (may_have_flags or due.watched or due.judges or due.at_step)
        # Another rank may have counted more or fewer updates, so its rules may be due and its trap may have voted.
        if is_idle and heard.severity <= FINE:
            self._before_edits(update, None)
            return None
        if due is NOTHING_DUE and not update.inside:
            return self.traps.follow_others(update, heard)
        if asks_ranks:
            self.agreement.check_norms(counter, due)
        return self._judge_and_edit(update, heard)

    @_torch.without_grad
    def _before_update(self, update: WeightUpdate) -> None:
        context = self.context
        if update.due.records:
            context.curves.updating(update.counter, update.optimizer())
        for rule in update.due.checks:
            when_judged(update.outcome, context.event_log.count_fired, rule, update.counter.step)
        for bound in update.due.before_update:
            bound.effect.before_update(update, bound)

    def _judge_and_edit(self, update: WeightUpdate, heard: Heard) -> StopReason | None:
        """Ask traps for their judgement of an update, then run the effects at `step`."""
        due = update.due
        catches_up = update.inside or not (update.counter.passes or update.by_hand)
        asked = due.final
        if catches_up:
            asked = tuple(sorted({*due.final, *due.watched}))
        gradients = Gradients(self.context, asked, update.scale)
        gradients.hidden = due.hidden_by
        gradients.outcome = update.outcome
        # Surgery by hand assigns gradients beside those of a pass.
        has_more = due.shows_assigned and len(gradients.indices) > update.counter.reached
        if catches_up or has_more:
            self._catch_up(update, gradients)
        passes = self.traps.passes.feeding(update.counter)
        judged = JudgedUpdate(
            update.counter,
            gradients,
            passes,
            heard,
            outcome=update.outcome or update.unread,
            has_moved=update.has_moved,
            trapped=due.trapped,
        )
        looks = self.traps.look(judged, due.judges)
        if update.unread is not None:
            looks, is_overflowed = self.traps.read(looks, update.unread)
            if is_overflowed:
                update.overflowed = update.unread.loss_scale
                return None
            self._before_update(update)
        # A trap judges the gradients that the script hands over: a repair by a rule at `step` comes too late.
        cause: StopReason | None = None
        if update.outcome is not None and update.outcome.for_traps:
            self.device.decide(judged, due, update.outcome, looks)
        else:
            cause = self.traps.decide(judged, looks)
        self._before_edits(update, gradients)
        edited = self._edit(gradients, due, acting=cause is None)
        # The condition depends on the rules alone, and all ranks have equal rules: they decide together.
        if due.judges_edits and cause is None:
            cause = self.traps.decide_edited(judged, due, edited)
        return cause

    def _before_edits(self, update: WeightUpdate, gradients: Gradients | None) -> None:
        for bound in update.due.before_edits:
            bound.effect.before_edits(update, bound, gradients)

    def _edit(self, gradients: Gradients, due: Due, *, acting: bool) -> set[int]:
        """Run the effects at `step` in file order; return the parameters whose gradient may have become non-finite."""
        suspicious: set[int] = set()
        if not due.at_step:
            return suspicious
        scale = gradients.scale
        edited = due.edited if acting else ()
        units = nullcontext() if scale is None else gradients.in_true_units(scale, edited)
        with torch.no_grad(), units:
            for bound in due.at_step:
                effect = bound.effect
                if effect.edits and not acting:
                    continue
                effect.act(gradients, bound)
                if effect.may_overflow and self.context.acts:
                    suspicious.update(gradients.having(bound.indices))
        return suspicious

    @_torch.without_grad
    def after_update(self, update: WeightUpdate) -> None:
        """Show an update that is over, whether it took place or not."""
        for bound in update.due.after_update:
            bound.effect.after_update(update, bound)
        self.device.updated()

    def act_after_pass(self, done: BackwardPass, known: Gradients | None = None) -> None:
        """Run effects on the gradients of a pass, once ranks have averaged them.

        ``known`` are the gradients of an update that had no pass.
        """
        context = self.context
        for counter in context.counters.among(done.indices):
            due = self.effects.due(counter)
            if not (due.watched or due.keeps_passes):
                continue
            gradients = known
            if gradients is None:
                gradients = Gradients(context, due.watched, done.scale)
            counter.reached = len(gradients.indices)
            # A snapshot without gradients still serves a spike report, which needs the order of the pass.
            if not (gradients.indices or due.keeps_passes):
                continue
            normed, norms = gradients.take_norms(due.normed)
            # A pass that still runs gets its snapshot when it ends.
            if due.keeps_passes and not done.is_part:
                snapshot = GradientSnapshot(
                    done, context.parameters, counter.indices, normed, norms
                )
                self.traps.passes.add(snapshot)
            for bound in due.accumulated:
                bound.effect.act(gradients, bound)

    def _catch_up(self, update: WeightUpdate, gradients: Gradients) -> None:
        """Show gradients that came before the hooks were on, or that the script assigned."""
        having = update.counter.indices
        if len(gradients.indices) < len(having):
            having = tuple(self.context.parameters.grads(having)[0])
        if update.inside:
            # Measured now: the script clears this gradient before the pass ends.
            scale = self.context.scaling.scale
            self.act_after_pass(BackwardPass(having, scale=scale, is_part=True))
        elif having:
            # A fused optimizer gets scaled gradients, any other optimizer gets unscaled gradients.
            self.act_after_pass(BackwardPass(having, scale=update.scale), gradients)
