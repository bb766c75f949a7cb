"""The moments of a training, downwards in the order of a step: each is one loop over the effects that are due."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from gradsurgeon.distributed.votes import Objection
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effects import Due, Effects
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training_events import (
    BackwardPass,
    GradientSnapshot,
    StepDecision,
    WeightUpdate,
)
from gradsurgeon.runtime.traps import Traps
from gradsurgeon.runtime.update import DueUpdate
from gradsurgeon.runtime.votes_heard import Heard
from gradsurgeon.tensors.backward_graph import BackwardGraph


class Training:
    """Shows the effects of a session what happens."""

    def __init__(self, context: Context, effects: Effects, kept: KeptCalls) -> None:
        self.context = context
        self.effects = effects
        self.traps = Traps(context, kept, effects)

    def before_pass(self, graph: BackwardGraph) -> None:
        for effect in self.effects.having("before_pass"):
            effect.before_pass(graph)

    def after_pass(self, done: BackwardPass) -> None:
        """Show the gradients that a backward pass has left, once DDP has averaged them."""
        for trap in self.effects.tensor_traps:
            trap.passed()
        for counter, snapshot in self._act_after(done).items():
            self._keep(counter, snapshot)

    def objections(self, done: BackwardPass) -> Sequence[Objection]:
        """Return what this rank has against the update that a pass feeds, for a vote of the ranks."""
        return self.traps.objections(done)

    def pass_is_over(self, done: BackwardPass) -> None:
        for effect in self.effects.having("after_pass"):
            effect.after_pass(done)

    def before_step(self, event: WeightUpdate) -> None:
        """Show an update before the closure of its optimizer runs, which may move weights."""
        for bound in self.effects.due(event.counter).having("before_step"):
            bound.effect.before_step(event, bound)

    def before_unscaling(self, event: WeightUpdate, scale: float) -> None:
        """Show gradients that a `GradScaler` is about to unscale, because the script has not."""
        for bound in self.effects.due(event.counter).having("before_unscaling"):
            bound.effect.before_unscaling(event, bound, scale)

    def before_update(self, event: WeightUpdate) -> None:
        for bound in self.effects.due(event.counter).having("before_update"):
            bound.effect.before_update(event, bound)

    def act_at_step(
        self, event: WeightUpdate, due: Due, heard: Heard, *, had_pass: bool
    ) -> StepDecision:
        """Let traps judge an update, then let the effects at `step` act."""
        gradients = Gradients(self.context, due.final, event.scale)
        gradients.hidden = due.hidden_by
        if event.inside or not had_pass:
            self._catch_up(event, gradients)
        passes = self.traps.passes.feeding(event.counter)
        update = DueUpdate(event, gradients, due.trapped, passes, heard)
        # A trap judges the gradients that the script hands over: a rule that repairs one does not excuse it.
        decision = self.traps.decide(update, due)
        self.before_edits(event, due, gradients)
        edited = self._edit(update, due, acting=not decision.stops)
        # The condition depends on the rules alone, and all ranks have equal rules: they decide together.
        if due.judges_edits and not decision.stops:
            decision = self.traps.decide_edited(update, due, edited)
        event.stopped = decision.stops
        if self.context.mode == "act" and due.hidden_by:
            decision = replace(decision, frozen=tuple(sorted(due.hidden_by)))
        return decision

    def before_edits(self, event: WeightUpdate, due: Due, gradients: Gradients | None) -> None:
        for bound in due.having("before_edits"):
            bound.effect.before_edits(event, bound, gradients)

    def _edit(self, update: DueUpdate, due: Due, *, acting: bool) -> set[int]:
        """Run the effects at `step` in file order; return the parameters whose gradient may have become non-finite."""
        suspicious: set[int] = set()
        if not due.at_step:
            return suspicious
        gradients = update.gradients
        scale = gradients.scale
        edited = due.edited if acting else ()
        units = nullcontext() if scale is None else gradients.in_true_units(scale, edited)
        with torch.no_grad(), units:
            for bound in due.at_step:
                effect = bound.effect
                if effect.edits and not acting:
                    continue
                effect.act(gradients, bound)
                if effect.rule.may_overflow and self.context.mode == "act":
                    suspicious.update(gradients.having(bound.indices))
        return suspicious

    def after_update(self, event: WeightUpdate) -> None:
        """Show an update that is over, whether it took place or not."""
        due = self.effects.due(event.counter)
        if self.context.mode == "act":
            event.hidden_by = due.hidden_by
        for bound in due.having("after_update"):
            bound.effect.after_update(event, bound)
        self.traps.passes.forget(event.counter)

    def skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Judge an update that a `GradScaler` leaves out; raise if a trap sees more than an overflow."""
        try:
            self.traps.skipped_by_scaler(counter, scale)
        finally:
            for trap in self.effects.tensor_traps:
                trap.forget(counter)

    def _act_after(
        self, done: BackwardPass, known: Gradients | None = None
    ) -> dict[StepCounter, GradientSnapshot]:
        """Let effects act on the gradients of a pass; ``known`` are those of an update that had no pass."""
        context = self.context
        snapshots = {}
        for counter in context.counters.among(done.indices):
            due = self.effects.due(counter)
            gradients = known
            if gradients is None or gradients.asked != due.watched:
                gradients = Gradients(context, due.watched, done.scale)
            # A snapshot without gradients still serves a spike report, which needs the order of the pass.
            if not (gradients or due.keeps_passes):
                continue
            normed = gradients.having(due.normed)
            norms = gradients.take_norms(normed)
            snapshots[counter] = GradientSnapshot(
                done, context.parameters, counter.indices, normed, norms
            )
            for bound in due.after_pass:
                bound.effect.act(gradients, bound)
        return snapshots

    def _keep(self, counter: StepCounter, snapshot: GradientSnapshot) -> None:
        if self.effects.due(counter).keeps_passes:
            self.traps.passes.add(snapshot)

    def _catch_up(self, event: WeightUpdate, gradients: Gradients) -> None:
        """Show gradients that came before the hooks were on, or that the script assigned."""
        counter = event.counter
        having = counter.indices
        if len(gradients) < len(having):
            having = tuple(self.context.parameters.grads(having)[0])
        if event.inside:
            # Measured now: the script clears this gradient before the pass ends.
            self._act_after(BackwardPass(having, scale=self.context.scaling.scale))
        elif having:
            # A fused optimizer gets scaled gradients, any other optimizer gets unscaled gradients.
            snapshots = self._act_after(BackwardPass(having, scale=event.scale), gradients)
            for holder, snapshot in snapshots.items():
                self._keep(holder, snapshot)
            own = snapshots.get(counter)
            if own is not None:
                gradients.know(own.indices, own.norms)
