"""Watches optimizers right before an update: finds them, calls the rules at `step`, and hides gradients.

Torch calls step hooks before the closure of an optimizer, so the watch wraps the closure: rules act when it returns.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurgeon import _dist, _live, _torch
from gradsurgeon._torch import uncompiled
from gradsurgeon.actions import FreezeRule, Rule, TrapRule
from gradsurgeon.errors import BindError
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.manual_steps import ManualSteps
from gradsurgeon.runtime.model_changes import ModelChanges
from gradsurgeon.runtime.training_events import Step, TrainingEvents
from gradsurgeon.runtime.traps import SCALER_SKIP

_LBFGS = (
    "LBFGS moves all parameters together and several times in a step, so no rule can hide a parameter from it or skip the "
    "step; make requires_grad false in the script, or use `then: raise`"
)
_MOVED = "the optimizer evaluates its closure after it has moved weights: they are not as before the step"
_INSIDE = (
    "an optimizer steps inside backward, parameter by parameter, so at no moment are all gradients there while the "
    "update can still be held back; step the optimizer after backward, or leave the rule out"
)


class Update(Step):
    """One call of `Optimizer.step`, from its first hook to its end; it reaches the optimizer weakly."""

    def __init__(self, optimizer: Optimizer, counter: StepCounter, frame: FrameType) -> None:
        inside = _torch.graph_task() != -1
        super().__init__(counter, inside=inside, optimizer=weakref.ref(optimizer))
        self.key = threading.get_ident(), id(optimizer)
        # The frame that calls the hooks, torch's wrapper around `step`: torch calls no hook after a step that raises.
        self.frame: FrameType | None = frame
        self._hidden: list[tuple[Tensor, Tensor]] = []
        # The numbers that the optimizer keeps on itself and in its groups, if the step is skipped.
        self._numbers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        # Whether traps have judged the gradients, and the last loss that a closure returned.
        self.judged = False
        self.loss: Any = None
        # The scale under which the gradients overflowed, so the scaler skips the update.
        self.overflowed: Tensor | None = None
        self.skipped = False

    def is_on_stack(self) -> bool:
        """Tell, in the thread of the step, whether the step still runs."""
        return self.frame in _callers()

    def skip(self, optimizer: Optimizer) -> None:
        """Hide all gradients: a zero gradient would still decay the weight and feed the moments."""
        self.skipped = True
        tables: list[dict[str, Any]] = [vars(optimizer), *optimizer.param_groups]
        self._numbers = [
            (table, {key: it for key, it in table.items() if isinstance(it, int | float)})
            for table in tables
        ]
        self.hide(params_of(optimizer))

    def hide(self, params: Iterable[Tensor | None]) -> None:
        for param in params:
            if param is not None and param.grad is not None:
                self._hidden.append((param, param.grad))
                param.grad = None

    def end(self) -> None:
        self.frame = None
        # Some optimizers count their steps even if no parameter has a gradient.
        for table, numbers in self._numbers:
            table.update(numbers)
        self.give_back()

    def give_back(self) -> None:
        hidden, self._hidden = self._hidden, []
        for param, grad in hidden:
            if param.grad is None:
                param.grad = grad


@dataclass(slots=True)
class Owner:
    counter: StepCounter
    handles: tuple[RemovableHandle, ...]
    tensors: tuple[int, ...] = ()
    # The version of the counters after this owner has claimed its tensors.
    version: int = -1


class OptimizerWatch:
    def __init__(
        self, context: Context, events: TrainingEvents, model: ModelChanges, manual: ManualSteps
    ) -> None:
        self._context = context
        self._events = events
        self._model = model
        self._manual = manual
        self._owners: weakref.WeakKeyDictionary[Optimizer, Owner] = weakref.WeakKeyDictionary()
        # The parameter ids of an optimizer and of the model when their ownership was last compared. All of these
        # parameters are alive at a comparison, so no id stands for two of them.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[int]]] = (
            weakref.WeakKeyDictionary()
        )
        # Steps under way, by thread and optimizer: each thread may step its own optimizers, one inside another.
        self._running: dict[tuple[int, int], Update] = {}

    @property
    def owned(self) -> bool:
        return len(self._owners) > 0

    def search(self, model_params: Iterable[Tensor]) -> bool:
        found = owning(model_params)
        for optimizer in found:
            self.meet(optimizer)
        return bool(found)

    def about_to_step(self, optimizer: Optimizer) -> None:
        owner = self._owners.get(optimizer)
        by_counter = self._context.by_counter
        if owner is None or by_counter.any_always or not self._context.rests(owner.counter.step):
            self.meet(optimizer)

    def meet(self, optimizer: Optimizer) -> Owner | None:
        owner = self._owners.get(optimizer)
        if owner is None:
            # A wrapper and its wrapped optimizer count as one optimizer with one counter.
            inner = _torch.stepping(optimizer)
            if inner is not optimizer:
                return None if inner is None else self.meet(inner)
        params = params_of(optimizer)
        held = list(map(id, params))
        if self._known.get(optimizer) == (held, self._context.parameters.ids()):
            return owner
        self._model.rearm()
        tensors = self._held(params)
        if owner is None and tensors:
            # `ZeroRedundancyOptimizer` steps an inner optimizer of its own.
            if any(set(tensors) <= set(outer.counter.tensors) for outer in self._under_way()):
                return None
            if isinstance(optimizer, LBFGS):
                self._refuse(tensors, _LBFGS, _hides)
            if not self._owners:
                self._manual.withdraw()
            counter = StepCounter(self._context.counters.begin(tensors))
            owner = self._owners[optimizer] = Owner(counter, self._hooks_on(optimizer))
        # The search above may have found parameters under new places.
        self._known[optimizer] = held, self._context.parameters.ids()
        if owner is not None:
            owner.tensors, owner.version = tuple(tensors), -1
            self._claim(owner)
        return owner

    def _hooks_on(self, optimizer: Optimizer) -> tuple[RemovableHandle, ...]:
        return (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def go_after(self, others: Iterable[OptimizerWatch], optimizer: Optimizer) -> None:
        owner = self._owners.get(optimizer)
        theirs = [watch._owners.get(optimizer) for watch in others]  # noqa: SLF001 # of its kind
        newest = max((other.handles[-1].id for other in theirs if other is not None), default=-1)
        if owner is not None and newest > owner.handles[-1].id:
            for handle in owner.handles:
                handle.remove()
            owner.handles = self._hooks_on(optimizer)

    def _held(self, params: list[Tensor]) -> list[int]:
        if any(_dist.is_flattened(param) for param in params):
            self._model.check()
        tensors = self._context.parameters.owned(params)
        if len(tensors) < len(params):
            # The others belong to another model, or to this model under unknown names.
            self._model.compare()
            self._model.rearm()
            tensors = self._context.parameters.owned(params)
        return tensors

    def _claim(self, owner: Owner) -> None:
        """Give the tensors of an optimizer back to its counter if another counter has claimed them since."""
        counters = self._context.counters
        if owner.version != counters.version:
            counters.claim(owner.tensors, owner.counter)
            owner.version = counters.version

    def _is_part_of(self, owner: Owner, outer: Update) -> bool:
        """Tell whether a step is one with an outer step, as by `super().step()`, or in a wrapper."""
        optimizer = outer.optimizer()
        around = None if optimizer is None else self._owners.get(optimizer)
        if around is None:
            return False
        return around is owner or (outer.judged and set(owner.tensors) <= set(around.tensors))

    def end_failed(self) -> None:
        """End the steps of this thread that have raised; the script may still hold their error."""
        if self._running:
            self._under_way()

    def _under_way(self) -> list[Update]:
        """Return the steps that this thread is in the middle of; end the steps that have raised."""
        thread = threading.get_ident()
        updates = [update for (of, _), update in list(self._running.items()) if of == thread]
        failed = [update for update in updates if not update.is_on_stack()]
        for update in failed:
            self._end(update, took_place=False)
        return [update for update in updates if update not in failed]

    def _refuse(self, tensors: Iterable[int], why: str, is_refused: Callable[[Rule], bool]) -> None:
        held, program = set(tensors), self._context.program
        stages = (*program.after_backward, *program.at_step)
        rules = [stage.rule for stage in stages if held & set(stage.tensors)]
        rules += [rule for rule, _ in program.site_rules if isinstance(rule, TrapRule)]
        if refused := dict.fromkeys(rule.id for rule in rules if is_refused(rule)):
            raise BindError([f"rule {rule}: {why}" for rule in refused])

    def close(self) -> None:
        for update in list(self._running.values()):
            update.end()
        self._running.clear()
        for owner in list(self._owners.values()):
            for handle in owner.handles:
                handle.remove()
        self._owners.clear()

    @uncompiled
    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if only_makes_state(optimizer):
            return None
        owner = self._owners[optimizer]
        if self._running and any(self._is_part_of(owner, one) for one in self._under_way()):
            # The two steps are one update: rules act once.
            return None
        self._claim(owner)
        # Only the frame tells a nested step from a failed step.
        update = Update(optimizer, owner.counter, sys._getframe(1))  # noqa: SLF001 # documented
        if update.inside:
            self._refuse(owner.tensors, _INSIDE, _needs_whole_step)
        self._running[update.key] = update
        self._events.update_began(update)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._act(optimizer, update)
            return None
        before = _versions(optimizer)

        def evaluate() -> Any:
            # An optimizer may evaluate several times, and the closure must find its own gradients each time.
            if update.skipped:
                return update.loss
            update.give_back()
            has_moved = update.judged or before != _versions(optimizer)
            update.loss = closure()
            self._act(optimizer, update, has_moved=has_moved)
            return update.loss

        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _act(self, optimizer: Optimizer, update: Update, *, has_moved: bool = False) -> None:
        self._context.refuse_graph_capture()
        update.has_moved = has_moved
        event_log = self._context.event_log
        # A fused optimizer gets scaled gradients and the overflow flag of the scaler.
        update.scale = getattr(optimizer, "grad_scale", None)
        overflow = getattr(optimizer, "found_inf", None)
        scaler = None if overflow is None else self._context.scaling.stepping(optimizer)
        if overflow is not None and scaler is not None:
            asks = self._context.due_rules(update.counter).ask_host
            if not (asks or self._context.program.traps or _torch.is_host(overflow)):
                # The optimizer checks the flag itself, on the device.
                step = update.counter.step
                text = SCALER_SKIP.format(step=step)
                event_log.emit_if(overflow, text, step=step, kind="scaler-skip")
                update.overflow = overflow
            elif bool(overflow):
                update.overflowed = scaler
                return
        decision = self._events.step_starting(update)
        update.judged = True
        error = decision.error or event_log.raised()
        if decision.skip and has_moved and decision.cause is not None:
            error = decision.cause.error(update.counter.step)
        if error is not None:
            if has_moved:
                error.add_note(_MOVED)
            self._end(update, took_place=decision.error is not None)
            raise error
        if decision.skip:
            update.skip(optimizer)
        elif decision.frozen:
            update.hide([self._context.parameters.param(i) for i in decision.frozen])

    @uncompiled
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        update = self._running.get((threading.get_ident(), id(optimizer)))
        if update is None or update.frame is not sys._getframe(1):  # noqa: SLF001 # as above
            return
        self._end(update)
        self._context.event_log.raise_raised()

    def _end(self, update: Update, *, took_place: bool = True) -> None:
        self._running.pop(update.key, None)
        update.end()
        if update.overflowed is not None:
            self._events.step_skipped_by_scaler(update.counter, update.overflowed)
        else:
            self._events.step_finished(update, took_place=took_place)


def _needs_whole_step(rule: Rule) -> bool:
    stops = isinstance(rule, TrapRule) and not rule.edits
    return stops or isinstance(rule, FreezeRule) or getattr(rule, "per", "") == "rule"


def _hides(rule: Rule) -> bool:
    return isinstance(rule, FreezeRule) or getattr(rule, "then", "") == "skip-step"


def _versions(optimizer: Optimizer) -> list[int]:
    return [param._version for param in params_of(optimizer)]  # noqa: SLF001 # documented


def owning(params: Iterable[Tensor]) -> list[Optimizer]:
    wanted = {id(param) for param in params}

    def candidates() -> list[Optimizer]:
        return [
            optimizer
            for optimizer in _live.instances(Optimizer)
            if any(id(param) in wanted for param in params_of(optimizer))
            and _torch.stepping(optimizer) is not None
        ]

    if not candidates():
        return []
    # Garbage that still waits for collection must not pass for the owner.
    gc.collect()
    return candidates()


def params_of(optimizer: Optimizer) -> list[Tensor]:
    # Wrappers that skip the constructor of their base class may have no groups of their own.
    groups = getattr(optimizer, "param_groups", ())
    return [param for group in groups for param in group["params"]]


def only_makes_state(optimizer: Optimizer) -> bool:
    """Tell whether `torch.distributed.checkpoint` steps a fresh optimizer to create its state."""
    module = "torch.distributed.checkpoint.state_dict"
    if optimizer.state or module not in sys.modules:
        return False
    for frame in _callers():
        if frame.f_code.co_name == "_init_optim_state":
            return frame.f_globals.get("__name__") == module
    return False


def _callers() -> list[FrameType]:
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 # documented
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
