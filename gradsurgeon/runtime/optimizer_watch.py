"""Watches optimizers right before an update: finds them, calls the rules at `step`, and hides gradients.

Torch calls step hooks before the closure of an optimizer, so the watch wraps the closure: rules act when it returns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurgeon.distributed.session_discovery import LIMIT
from gradsurgeon.runtime import first_update
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.device_decisions import DeviceDecisions
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.manual_steps import ManualSteps
from gradsurgeon.runtime.model_changes import ModelChanges
from gradsurgeon.runtime.optimizers import (
    first_with_gradient,
    only_makes_state,
    owning,
    versions,
)
from gradsurgeon.runtime.owners import Owner, Owners
from gradsurgeon.runtime.running_steps import LentFlag, RunningStep, params_of, running
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training_events import TrainingEvents
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors._torch import uncompiled

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerWatch:
    def __init__(
        self,
        context: Context,
        events: TrainingEvents,
        effects: Effects,
        model: ModelChanges,
        manual: ManualSteps,
        *,
        device: DeviceDecisions,
    ) -> None:
        self._context = context
        self._events = events
        self._effects = effects
        self._model = model
        self._manual = manual
        self._device = device
        self._known_owners = Owners(context, model)
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

    def go_after(self, others: Iterable[OptimizerWatch], optimizer: Optimizer) -> None:
        owner = self._owners.get(optimizer)
        newest = max(watch._known_owners.newest_hook(optimizer) for watch in others)  # noqa: SLF001 # of its kind
        if owner is not None and newest > owner.handles[-1].id:
            for handle in owner.handles:
                handle.remove()
            owner.handles = self._hooks_on(optimizer)

    def end_failed(self) -> None:
        """End the steps of this thread that have raised, if torch did not show their end."""
        if running:
            self._under_way()

    def _under_way(self) -> list[RunningStep]:
        """Return the steps that this thread is in the middle of; end the steps that have raised."""
        thread = threading.get_ident()
        under_way = [update for update in self._running() if update.thread == thread]
        for update in list(under_way):
            if not update.is_on_stack():
                under_way.remove(update)
                self._end(update, took_place=update.returned)
        return under_way

    def _running(self) -> list[RunningStep]:
        # A bound method equals another one of the same object.
        return [update for update in tuple(running) if update.on_raise == self._failed]

    def end_all(self) -> None:
        """Give hidden gradients back, and forget the steps under way."""
        for update in self._running():
            update.end()

    def close(self) -> None:
        """Take the hooks off; off an optimizer that is stepping once its step is over."""
        self._closed = True
        for update in self._running():
            if not update.is_on_stack():
                update.end()
        stepping = {id(update.optimizer()) for update in self._running()}
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
        self._events.update_began(update)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._act(optimizer, update)
            return None
        before = versions(optimizer)

        def evaluate() -> Any:
            # An optimizer may evaluate several times, and the closure must find its own gradients each time.
            if update.skipped:
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
        self._device.settle(limit=LIMIT)
        if event_log.raised:
            self._end(update, took_place=False)
            event_log.raise_raised()
        if self._device.begin(optimizer, update):
            return
        decision = self._events.step_starting(update)
        if update.overflowed is not None:
            return
        update.judged = True
        update.stopped = decision.stops
        if decision.error is not None:
            self._end(update)
            raise decision.error()
        if event_log.raised:
            self._end(update, took_place=False)
            event_log.raise_raised()
        if decision.skip:
            update.skip(optimizer)
        elif decision.frozen:
            update.hide(optimizer, self._context.parameters.params(decision.frozen))
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
                self._show(optimizer, update)
        except Exception as error:
            if not self._context.refusals.goes_on_after(error):
                raise

    def _show(self, optimizer: Optimizer, update: RunningStep) -> None:
        owner = self._owners[optimizer]
        owner.clears = update.show_after(clears=owner.clears)

    @uncompiled
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del optimizer, args, kwargs
        frame = sys._getframe(1)  # noqa: SLF001 # as above
        event_log = self._context.event_log
        # Torch goes through the hooks now, so the hooks of a session that is removed go later.
        try:
            update = self._of_frame(frame)
            if update is not None and not self._closed:
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
            self._end(update, took_place=update.returned)
        except Exception as error:  # noqa: BLE001 # the script gets the error of its step
            self._context.event_log.raised.append(error)

    def _end(self, update: RunningStep, *, took_place: bool = True) -> None:
        update.end()
        if self._closed:
            self._known_owners.let_go(update.optimizer())
            return
        if update.overflowed is not None:
            self._events.step_skipped_by_scaler(update.counter, update.overflowed)
        else:
            update.report(self._context.event_log)
            self._events.step_finished(update, took_place=took_place and not update.left_out)
