"""Watches optimizers right before an update: finds them, calls the rules at `step`, and hides gradients.

Torch calls step hooks before the closure of an optimizer, so the watch wraps the closure: rules act when it returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurgeon.distributed.ranks import StopReason
from gradsurgeon.distributed.session_discovery import LIMIT
from gradsurgeon.runtime import first_update
from gradsurgeon.runtime.effect import WeightUpdate
from gradsurgeon.runtime.manual_steps import ManualSteps
from gradsurgeon.runtime.model_changes import ModelChanges
from gradsurgeon.runtime.optimizers import (
    first_with_gradient,
    only_makes_state,
    owning,
    versions,
)
from gradsurgeon.runtime.owners import Owner, Owners
from gradsurgeon.runtime.running_steps import LentFlag, RunningStep, end_failed, params_of, running
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training import Training
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors._torch import uncompiled

_LEFT_OUT = "step {step}: DeepSpeed left the update out, because gradients were not finite"
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerWatch:
    def __init__(
        self,
        training: Training,
        finished: Callable[[WeightUpdate], None],
        model: ModelChanges,
        manual: ManualSteps,
    ) -> None:
        self._training = training
        self._context = training.context
        self._effects = training.effects
        # Counts an attempted update.
        self._finished = finished
        self._model = model
        self._manual = manual
        self._known_owners = Owners(self._context, model)
        self._owners = self._known_owners.by_optimizer
        self._closed = False

    @property
    def owned(self) -> bool:
        return len(self._owners) > 0

    def search(self, model_params: Iterable[Tensor]) -> bool:
        optimizers = owning(model_params)
        for optimizer in optimizers:
            self.meet(optimizer)
        return bool(optimizers)

    def about_to_step(self, optimizer: Optimizer) -> None:
        owner = self._owners.get(optimizer)
        always_acts = self._effects.any_always
        if owner is None or always_acts or not self._effects.rests(owner.counter.step):
            self.meet(optimizer)
        if owner is not None and owner.goes_last:
            owner.goes_last = False
            for handle in owner.handles:
                handle.remove()
            owner.handles = self._hooks_on(optimizer)

    def go_last(self) -> None:
        """Act after the sessions that exist now, from the next update of each optimizer on."""
        for owner in self._owners.values():
            owner.goes_last = True

    def meet(self, optimizer: Optimizer) -> Owner | None:
        owner = self._owners.get(optimizer)
        if owner is None:
            # A wrapper and its wrapped optimizer count as one optimizer with one counter.
            inner = _torch.hooked_optimizer(optimizer)
            if inner is not optimizer:
                return None if inner is None else self.meet(inner)
        owners = self._known_owners
        params = params_of(optimizer)
        if owners.is_known(optimizer, params):
            return owner
        self._model.rearm()
        indices = owners.indices_of(params)
        if owner is None and indices:
            # `ZeroRedundancyOptimizer` steps an inner optimizer of its own.
            if any(set(indices) <= set(outer.counter.indices) for outer in self._under_way()):
                return None
            if isinstance(optimizer, LBFGS):
                self._effects.refuse_under_lbfgs(indices)
            if not self._owners:
                self._manual.withdraw()
            counter = StepCounter(self._context.counters.begin(indices))
            owner = Owner(counter, self._hooks_on(optimizer))
            self._owners[optimizer] = owner
        # The search above may have found parameters under new places.
        owners.note(optimizer, params)
        if owner is not None:
            owner.indices = indices
            owner.version = -1
            owners.claim(owner)
        return owner

    def _hooks_on(self, optimizer: Optimizer) -> tuple[RemovableHandle, ...]:
        return (
            optimizer.register_step_pre_hook(self._before),
            _torch.register_first_step_post_hook(optimizer, self._returned),
            optimizer.register_step_post_hook(self._after),
        )

    def _under_way(self) -> list[RunningStep]:
        """Return the steps that this thread is in the middle of."""
        return self._own(end_failed())

    def _own(self, updates: Iterable[RunningStep]) -> list[RunningStep]:
        # A bound method equals another one of the same object.
        return [update for update in updates if update.on_raise == self._failed]

    def end_all(self) -> None:
        """Give hidden gradients back, and forget the steps under way."""
        for update in self._own(tuple(running)):
            update.end()

    def close(self) -> None:
        """Take the hooks off; off an optimizer that is stepping once its step is over."""
        self._closed = True
        for update in self._own(tuple(running)):
            if not update.is_on_stack():
                update.end()
        stepping = {id(update.optimizer()) for update in self._own(tuple(running))}
        for optimizer in list(self._owners):
            if id(optimizer) not in stepping:
                self._known_owners.let_go(optimizer)

    @uncompiled
    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        # The frame of torch's wrapper. Only the frame distinguishes a nested step from a failed step.
        frame = sys._getframe(1)  # noqa: SLF001 # documented
        try:
            return self._begin(optimizer, (args, kwargs), frame)
        except Exception as error:
            if not self._context.refusals.goes_on_after(error):
                raise
        return None

    def _begin(
        self, optimizer: Optimizer, given: _Arguments, frame: FrameType
    ) -> _Arguments | None:
        args, kwargs = given
        if self._closed or self._context.refusals.over or only_makes_state(optimizer):
            return None
        owner = self._owners[optimizer]
        if running and self._known_owners.is_part_of_any(owner, self._under_way()):
            # The two steps are one update: rules act once.
            return None
        self._known_owners.claim(owner)
        if not owner.counter.begun:
            first_update.mention(self._context, self._effects, optimizer, owner.counter)
        update = RunningStep(optimizer, owner.counter, frame, self._failed)
        if update.inside:
            self._effects.refuse_inside_backward(owner.indices)
        running.append(update)
        self._training.find_due(update)
        for bound in update.due.before_step:
            bound.effect.before_step(update, bound)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._act(optimizer, update)
            return None
        before = versions(optimizer)

        def evaluate() -> Any:
            # An optimizer may evaluate several times, and the closure must find its own gradients each time.
            if update.stopped:
                return update.loss
            update.show()
            update.has_moved = update.judged or before != versions(optimizer)
            update.loss = closure()
            with self._context.refusals:
                self._act(optimizer, update)
            return update.loss

        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _act(self, optimizer: Optimizer, update: RunningStep) -> None:
        if _torch.is_capturing():
            self._context.refuse_graph_capture()
        event_log = self._context.event_log
        device = self._training.device
        device.settle(limit=LIMIT)
        cause: StopReason | None = None
        # The device may have stopped the update before.
        if not event_log.raised and not device.begin(optimizer, update):
            cause = self._training.step_starting(update)
        if update.overflowed is None:
            update.judged = True
            update.stopped = cause is not None
            if cause is not None and not cause.skips:
                update.returned = True
                self._end(update)
                # A frame that held the error would keep the optimizer alive with its traceback.
                raise cause.error()
            if event_log.raised:
                self._end(update)
                event_log.raise_raised()
        if update.stopped:
            update.skip(optimizer)
        elif update.hidden_by:
            # Under an overflow too: a fused optimizer makes state in a step that it leaves out.
            update.hide(optimizer, self._context.parameters.params(update.hidden_by))
        if update.outcome is not None and update.outcome.for_traps:
            update.flag = LentFlag(optimizer, update.outcome.left_out)
        update.witness = first_with_gradient(optimizer)

    @uncompiled
    def _returned(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Show hidden gradients again, before the script's hooks after the step."""
        del args, kwargs
        frame = sys._getframe(1)  # noqa: SLF001 # as above
        try:
            update = self._of_frame(frame)
            if update is not None:
                update.returned = True
                owner = self._owners[optimizer]
                cleared = update.has_cleared()
                if cleared is None:
                    # A step that found no gradient is taken to do as earlier steps of its optimizer.
                    cleared = bool(owner.clears)
                elif owner.clears is not False:
                    owner.clears = cleared
                update.show(cleared=cleared)
        except Exception as error:
            if not self._context.refusals.goes_on_after(error):
                raise

    @uncompiled
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del optimizer, args, kwargs
        frame = sys._getframe(1)  # noqa: SLF001 # as above
        event_log = self._context.event_log
        # Torch goes through the hooks now, so the hooks of a session that is removed go later.
        try:
            update = self._of_frame(frame)
            if update is not None and not self._closed:
                update.returned = True
                self._end(update)
                if event_log.raised:
                    event_log.raise_raised()
        except Exception as error:
            if not self._context.refusals.goes_on_after(error):
                raise

    def _of_frame(self, frame: FrameType) -> RunningStep | None:
        for update in tuple(running):
            if update.frame is frame and update.on_raise == self._failed:
                return update
        return None

    def _failed(self, update: RunningStep) -> None:
        """End a step that torch has left without a call of `_after`."""
        update.raised = True
        try:
            self._end(update)
        except Exception as error:  # noqa: BLE001 # the script gets the error of its step
            self._context.event_log.raised.append(error)

    def _end(self, update: RunningStep) -> None:
        update.end()
        if self._closed:
            self._known_owners.let_go(update.optimizer())
            return
        if update.overflowed is None and update.left_out:
            text = _LEFT_OUT.format(step=update.counter.step)
            self._context.event_log.emit("skipped-step", text, step=update.counter.step)
        self._finished(update)
