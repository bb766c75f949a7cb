"""The step point of scripts that have no torch optimizer and update their weights by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.errors import BindError, GradSurgeonError, NonFiniteGradientError
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.param_hooks import Hook
from gradsurgeon.runtime.step_decision import StepDecision
from gradsurgeon.runtime.training_events import BackwardPass, Step, TrainingEvents

_NOTICE = (
    "no torch optimizer owns the parameters: the end of a backward pass that began on empty gradients "
    "counts as the step; {tick} right before each update to mark the steps yourself"
)


def how_to_tick(context: Context) -> str:
    """Return how a script can mark its steps."""
    if context.outside:
        # Nobody in there has a session whose steps could be marked.
        return (
            "put the rules on in the script, by gradsurgeon.apply(), and call tick() of the session"
        )
    return "call session.tick()"


class GuardHook(Hook):
    """Tensor hook that looks, before a gradient is accumulated, whether one is there already."""

    def __init__(
        self,
        context: Context,
        passes: BackwardWatch,
        manual: ManualSteps,
        tensor: int,
        label: str,
        *,
        edited: bool,
    ) -> None:
        super().__init__(context, passes, tensor, label)
        self._manual = weakref.ref(manual)
        self._edited = edited

    @uncompiled
    def __call__(self, _grad: Tensor | None) -> None:
        """Note what the gradient holds that this pass is about to add to."""
        live, manual = self._live(), self._manual()
        if live is None or manual is None:
            return
        context, passes = live
        param = context.parameters.param(self._tensor)
        if param is None or param.grad is None or not passes.is_training(param):
            return
        if _torch.is_capturing():
            raise GradSurgeonError(
                "a CUDA graph is being captured and no torch optimizer owns the parameters: whether a "
                f"backward pass is a step of its own would have to be read from the device; {_declare(context)} "
                "before each update"
            )
        # Scripts that zero in place keep the tensor. Reading it is the price of not guessing: here where it
        # is free, once at the end of the pass where it is a wait.
        with torch.no_grad():
            held = (_dist.local(param.grad) != 0).any()
        if _torch.is_host(held):
            if not bool(held):
                return
            if self._edited and not manual.provisional:
                manual.refuse_to_compound([self._tensor])
        passes.current().onto.append((self._tensor, self._edited, held))


def _declare(context: Context) -> str:
    if context.outside:
        return (
            "put the rules on in the script, by gradsurgeon.apply(model, rules, optimizer=[]), and call "
            "tick() of that session"
        )
    return "pass optimizer=[] to apply() and call session.tick()"


class ManualSteps:
    """Counts the steps of a hand-written update, by backward passes or by `tick()`.

    Args:
        context: what rules may use while they act.
        events: told of the steps.
        declared: the script marks its steps, a backward pass is never one.
        provisional: an optimizer may turn up after these backward passes: what an update by hand would
            have to be told or refused waits until one is seen.
    """

    def __init__(
        self, context: Context, events: TrainingEvents, *, declared: bool, provisional: bool
    ) -> None:
        self._context = context
        self._events = events
        self.declared = declared
        self.provisional = provisional
        self.active = declared
        # The last pass has been counted as a step, and judged so.
        self._counted = False
        self._last = StepDecision()
        # The gradients that were edited at its end.
        self._edited: dict[int, weakref.ref[Tensor]] = {}
        # The tensors that a pass has reached while their gradients, edited as final ones, were still there.
        self._compounded: list[int] = []
        self._began = context.counters.common.step
        self._full = set(context.parameters.grads(range(len(context.parameters)))[0])

    def check_accumulation(self, done: BackwardPass) -> None:
        """Find out whether a pass went on with an earlier one. Reads each device once.

        Raises:
            GradSurgeonError: it was added to gradients that were edited as final ones.
        """
        held = measure.read([flag for _, _, flag in done.onto])
        onto = [entry for entry, any_ in zip(done.onto, held, strict=True) if any_]
        compounded = [tensor for tensor, edited, _ in onto if edited]
        if self.provisional:
            # Nothing has been updated since, so that this pass takes the place of the one before.
            self._compounded = compounded or self._compounded
            return
        done.continued |= bool(onto)
        self.refuse_to_compound(compounded)

    def refuse_to_compound(self, tensors: Sequence[int]) -> None:
        """Refuse a second pass onto gradients that were edited as final ones.

        Raises:
            GradSurgeonError: naming the first of them.
        """
        if tensors and self._context.mode == "act":
            name = self._context.program.names[tensors[0]]
            raise GradSurgeonError(
                f"a second backward pass reached {name} while its gradient of the pass before, which a rule "
                "at `step` has already edited, was still there: the edit would compound. No torch optimizer "
                "owns the parameters, so every backward pass counts as a step. If the script accumulates, "
                f"{_declare(self._context)} right before each update; if it does not, clear the gradients "
                "after the update"
            )

    def edited(self) -> list[int]:
        """Return the tensors that a rule at `step` edits: a second pass onto them would compound."""
        return sorted({i for stage in self._context.program.step_edits for i in stage.tensors})

    def begin(self, done: BackwardPass) -> None:
        """Go over to hand-written updates, after the first pass that no optimizer has claimed."""
        self.active = True
        # No guard was there for this pass; gradients from before `apply` stand for it.
        full = self._full.intersection(done.order)
        self._compounded = sorted(full.intersection(self.edited())) or self._compounded
        if not self.provisional:
            done.continued = bool(full)
            self._announce()

    def again(self) -> None:
        """Take back the step that the last pass was counted as: nothing was updated after it."""
        self._compounded = []
        if self._counted and not self.declared:
            self._counted = False
            counters = self._context.counters
            counters.common.step -= 1
            counters.start = counters.common.step

    def confirm(self) -> None:
        """Say what waited until an update by hand was seen.

        Raises:
            BindError: a rule needs an optimizer.
            GradSurgeonError: gradients were edited and added to before that update.
        """
        self.provisional = False
        if self.active:
            self._announce()

    def _announce(self) -> None:
        """Tell what updates by hand come to, and refuse what cannot act on them."""
        self._refuse_freezes()
        event_log, step = self._context.event_log, self._context.counters.latest
        event_log.once("manual", _NOTICE.format(tick=how_to_tick(self._context)), step=step)
        for stage in self._context.program.traps:
            if getattr(stage.rule, "then", "") == "skip-step":
                text = (
                    "`then: skip-step` cannot hide gradients from an update written by hand: it will "
                    "raise instead"
                )
                if not self._context.outside:
                    text += ", unless the script asks session.tick() whether to update"
                event_log.emit("notice", text, rule=stage.rule.id, step=step, warn=True)
        self.refuse_to_compound(self._compounded)

    def _refuse_freezes(self) -> None:
        for stage in self._context.program.freezes:
            raise BindError(
                [
                    f"rule {stage.rule.id}: weights are updated by hand, so that there is no optimizer "
                    "to hide a gradient from; set requires_grad to false, or use `zero`"
                ]
            )

    @contextmanager
    def step_of(self, done: BackwardPass) -> Iterator[None]:
        """Let a pass that went on with an earlier one belong to the step that has been counted."""
        counter = self._context.counters.common
        back = int(done.continued and self._counted and not self.declared)
        counter.step -= back
        try:
            yield
        finally:
            counter.step += back

    def after(self, done: BackwardPass) -> None:
        """Count a finished backward pass as the step, unless it went on with an earlier one.

        Raises:
            NonFiniteGradientError: a trap stops the update.
        """
        if self.declared:
            return
        step = Step(self._context.counters.common)
        with self.step_of(done):
            number, decision = step.counter.step, self._events.step_starting(step)
        if not done.continued:
            self._counted = True
            edited = zip(*self._context.parameters.grads(self.edited()), strict=True)
            self._edited = {tensor: weakref.ref(grad) for tensor, grad in edited}
            self._events.step_finished(step, took_place=True)
        self._last = decision
        if decision.error is not None:
            raise decision.error
        if decision.skip and (cause := decision.cause) is not None:
            raise NonFiniteGradientError(
                f"{cause.text}\n(`then: skip-step` cannot hide gradients from an update written by "
                f"hand: {_declare(self._context)}, and update only where that is true)",
                rule=cause.rule,
                step=number,
                rank=cause.rank,
                name=cause.name,
            )

    def withdraw(self) -> dict[int, weakref.ref[Tensor]]:
        """Leave the counting to an optimizer that has turned up after all.

        What was counted stays counted: who has steps of both kinds must find no number twice.

        Returns:
            The gradients that were edited at the end of the pass that it is about to consume.
        """
        counter = self._context.counters.common
        if self.provisional:
            self.provisional = False
            self.again()
        elif self.active and self._counted and not self.declared:
            steps = counter.step - self._began
            text = (
                "an optimizer owns the parameters from now on; the backward passes before it were counted "
                f"as {steps} step{'s' if steps > 1 else ''}, which stay counted; make it before the first "
                "backward pass, or name it: apply(..., optimizer=)"
            )
            self._context.event_log.once("late optimizer", text, step=counter.step)
        self.active = False
        return self._edited

    def tick(self) -> bool:
        """Mark one update, right before the script does it by hand.

        Returns:
            Whether to update: ``False`` where a trap with `then: skip-step` tripped.

        Raises:
            NonFiniteGradientError: a trap stops the update.
        """
        self._refuse_freezes()
        first, self.declared, self.active = not self.declared, True, True
        if first and self._counted:
            # The pass before this first tick has been counted and judged; from now on only ticks are.
            decision = self._last
        else:
            step = Step(self._context.counters.common)
            decision = self._events.step_starting(step)
            self._events.step_finished(step, took_place=True)
        if decision.error is not None:
            raise decision.error
        return not decision.skip
