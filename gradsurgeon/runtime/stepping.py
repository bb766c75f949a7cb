"""Right before an update: finds the optimizers, calls the rules at `step`, hides gradients to skip.

Torch calls step hooks before a closure that the optimizer is given. The update happens after it, so
the closure is wrapped and the rules act when it returns.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurgeon.errors import BindError
from gradsurgeon.runtime.capture import check_capture
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.compiled import at_update
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.trap import Verdict


@dataclass(slots=True)
class Owner:
    """An optimizer that owns parameters of the session, as far as the session knows it."""

    clock: Clock
    handles: tuple[RemovableHandle, ...]
    params: int
    tensors: tuple[int, ...] = ()
    version: int = -1


@dataclass(slots=True)
class Running:
    """One call of `Optimizer.step` under way."""

    frame: FrameType
    clock: Clock
    hidden: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    snapshot: tuple[list[tuple[Tensor, Tensor]], dict[Any, Any]] | None = None
    skipped: bool = False
    scaled_away: bool = False


def _all_kinds(kind: type[Optimizer]) -> set[type[Optimizer]]:
    return {kind}.union(*(_all_kinds(one) for one in kind.__subclasses__()))


def _size(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in getattr(optimizer, "param_groups", ()))


def _params(optimizer: Optimizer) -> list[Tensor]:
    # Wrappers that skip the constructor of their base may have no groups of their own.
    groups = getattr(optimizer, "param_groups", ())
    return [param for group in groups for param in group["params"]]


class Steps:
    """The step point of one session, over all optimizers that own its parameters."""

    def __init__(
        self,
        state: State,
        *,
        judge: Callable[[Clock], Verdict],
        finished: Callable[..., None],
        first_owner: Callable[[], None],
        scaled_away: Callable[[Clock], None],
    ) -> None:
        self._state = state
        self._judge = judge
        self._finished = finished
        self._first_owner = first_owner
        self._scaled_away = scaled_away
        # How often an optimizer of ours has begun a step; a scaler that skips one leaves it as it is.
        self.begun = 0
        self._owners: weakref.WeakKeyDictionary[Optimizer, Owner] = weakref.WeakKeyDictionary()
        self._foreign: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._running: Running | None = None

    @property
    def owned(self) -> bool:
        """Whether any optimizer is known to own parameters of the session."""
        return len(self._owners) > 0

    def search(self, model_params: Iterable[Tensor]) -> bool:
        """Look for optimizers that own parameters of the model among all live objects.

        Returns:
            Whether there is one, be its parameters matched by a rule or not.
        """
        wanted = {id(param) for param in model_params}

        # The type is asked, not the object: proxies claim to be what they stand for.
        kinds = _all_kinds(Optimizer)

        def candidates() -> list[Optimizer]:
            optimizers = [found for found in gc.get_objects() if type(found) in kinds]
            return [
                found
                for found in optimizers
                if any(id(param) in wanted for param in _params(found))
            ]

        found = candidates()
        if found:
            # One that only waits to be collected must not pass for the owner.
            del found
            gc.collect()
            found = candidates()
        for optimizer in found:
            self.meet(optimizer)
        return bool(found)

    def meet(self, optimizer: Optimizer) -> Owner | None:
        """Make an optimizer known; it is the owner from now on of what it holds."""
        size = _size(optimizer)
        owner = self._owners.get(optimizer)
        if owner is not None and owner.params == size:
            return owner
        if owner is None and self._foreign.get(optimizer) == size:
            return None
        tensors = self._state.targets.owned(_params(optimizer))
        if not tensors:
            self._foreign[optimizer] = size
            return None
        if owner is None:
            self._check(optimizer, tensors)
            if not self._owners:
                self._first_owner()
            handles = (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )
            owner = Owner(Clock(self._state.clocks.start), handles, size)
            self._owners[optimizer] = owner
        owner.params, owner.tensors, owner.version = size, tuple(tensors), -1
        self._claim(owner)
        return owner

    def _check(self, optimizer: Optimizer, tensors: Iterable[int]) -> None:
        """Refuse an optimizer that no gradient can be hidden from.

        Raises:
            BindError: naming the rule.
        """
        own = set(tensors)
        rules = [stage.rule for stage in self._state.program.freezes if own & set(stage.tensors)]
        if rules and isinstance(optimizer, LBFGS):
            raise BindError(
                [
                    f"rule {rule.id}: LBFGS moves all parameters together, so that `freeze` cannot "
                    "hide one from it; make requires_grad false in the script, or use `zero`"
                    for rule in rules
                ]
            )

    def _claim(self, owner: Owner) -> None:
        """Give the tensors of an optimizer to its clock, where another one has taken them since."""
        clocks = self._state.clocks
        if owner.version != clocks.version:
            clocks.claim(owner.tensors, owner.clock)
            owner.version = clocks.version

    def close(self) -> None:
        """Take all hooks off the optimizers and give hidden gradients back."""
        if self._running is not None:
            self._restore(self._running)
            self._running = None
        for owner in list(self._owners.values()):
            for handle in owner.handles:
                handle.remove()
        self._owners.clear()

    @at_update
    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        frame = sys._getframe(1)  # noqa: SLF001 # the one way to tell a nested step from a failed one
        if self._running is not None:
            if _is_below(frame, self._running.frame):
                # `super().step()`, or a wrapper that steps an inner optimizer: one update, one visit.
                return None
            # The last step raised, so torch never called the post hook. It was an attempt.
            self._end(self._running, took_place=False)
        owner = self._owners[optimizer]
        self.begun += 1
        self._claim(owner)
        running = self._running = Running(frame, owner.clock)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._act(optimizer, running)
            return None
        if not _evaluates_before_moving(optimizer):
            running.snapshot = _snapshot(optimizer)
        wrapped = self._wrapped(closure, optimizer, running)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _wrapped(
        self, closure: Callable[[], Any], optimizer: Optimizer, running: Running
    ) -> Callable[[], Any]:
        def evaluate() -> Any:
            # An optimizer may evaluate several times; the closure must find its gradients again.
            self._restore(running)
            result = closure()
            self._act(optimizer, running)
            return result

        return evaluate

    def _act(self, optimizer: Optimizer, running: Running) -> None:
        if self._state.paused:
            return
        check_capture(self._state)
        # A fused optimizer gets scaled gradients, and the scaler's word on whether they overflowed.
        self._state.scaling.at_step = getattr(optimizer, "grad_scale", None)
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and self._state.scaling.active and bool(overflow):
            running.scaled_away = True
            return
        verdict = self._judge(running.clock)
        if verdict.error is not None:
            self._undo(optimizer, running)
            self._end(running)
            raise verdict.error
        if verdict.skip:
            running.skipped = True
            self._undo(optimizer, running)
            # A gradient of zero would still decay the weight and feed the moments; none at all is
            # what optimizers leave alone.
            self._hide(running, _params(optimizer))
        elif verdict.frozen:
            self._hide(running, [self._state.targets.param(i) for i in verdict.frozen])

    def _hide(self, running: Running, params: Iterable[Tensor | None]) -> None:
        for param in params:
            if param is not None and param.grad is not None:
                running.hidden.append((param, param.grad))
                param.grad = None

    def _undo(self, optimizer: Optimizer, running: Running) -> None:
        """Take back what an optimizer did in this step before the trap could see its gradients."""
        if running.snapshot is None:
            return
        weights, state = running.snapshot
        with torch.no_grad():
            for param, value in weights:
                param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(copy.deepcopy(state, {id(p): p for p in _params(optimizer)}))

    @at_update
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        running = self._running
        if running is None or running.frame is not sys._getframe(1):  # noqa: SLF001 # as above
            return
        if running.skipped:
            self._undo(optimizer, running)
        self._end(running)

    def _end(self, running: Running, *, took_place: bool = True) -> None:
        self._running = None
        self._state.scaling.at_step = None
        self._restore(running)
        if running.scaled_away:
            self._scaled_away(running.clock)
        else:
            self._finished(running.clock, took_place=took_place)

    def _restore(self, running: Running) -> None:
        for param, grad in running.hidden:
            if param.grad is None:
                param.grad = grad
        running.hidden.clear()


def _is_below(frame: FrameType | None, outer: FrameType) -> bool:
    """Tell whether ``outer`` is still running, somewhere below ``frame`` on the stack."""
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False


def _evaluates_before_moving(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer calls its closure once and moves its weights only then.

    Torch's own do, but for LBFGS. Of others it is not known.
    """
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, LBFGS
    )


def _snapshot(optimizer: Optimizer) -> tuple[list[tuple[Tensor, Tensor]], dict[Any, Any]]:
    """Copy weights and state, for an optimizer that moves weights between evaluations."""
    params = _params(optimizer)
    weights = [(param, param.detach().clone()) for param in params]
    # The keys of the state are the parameters themselves and must stay these.
    return weights, copy.deepcopy(dict(optimizer.state), {id(param): param for param in params})
