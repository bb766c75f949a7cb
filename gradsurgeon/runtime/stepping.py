"""Right before an update: finds the optimizers, calls the rules at `step`, hides gradients to skip.

Torch calls step hooks before a closure that the optimizer is given. The update happens after it, so
the closure is wrapped and the rules act when it returns.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurgeon import _dist, _torch
from gradsurgeon.runtime import optimizers
from gradsurgeon.runtime.capture import check_capture
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.compiled import at_update
from gradsurgeon.runtime.optimizers import Snapshot
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.verdict import Verdict


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
    snapshot: Snapshot | None = None
    # It runs inside a backward pass, on what that pass has finished so far.
    inside: bool = False
    skipped: bool = False
    scaled_away: bool = False
    # Told by a flag on the device whether to skip.
    flagged: Optimizer | None = None


class Steps:
    """The step point of one session, over all optimizers that own its parameters."""

    def __init__(
        self,
        state: State,
        *,
        judge: Callable[..., Verdict],
        finished: Callable[..., None],
        first_owner: Callable[[], None],
        new_params: Callable[[], None],
        scaled_away: Callable[[Clock], None],
        recheck: Callable[[], None],
        gone: Callable[[], None],
    ) -> None:
        self._state = state
        self._judge = judge
        self._finished = finished
        self._first_owner = first_owner
        self._new_params = new_params
        self._scaled_away = scaled_away
        # Raises where the rules cannot act on what has become of the model.
        self._recheck = recheck
        # An optimizer has been collected: somebody else may update its parameters from now on.
        self._gone = gone
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
        found = optimizers.owning(model_params)
        for optimizer in found:
            self.meet(optimizer)
        return bool(found)

    def meet(self, optimizer: Optimizer) -> Owner | None:
        """Make an optimizer known; it is the owner from now on of what it holds."""
        self._forget_failed()
        size = optimizers.size_of(optimizer)
        owner = self._owners.get(optimizer)
        if owner is None:
            # A wrapper and what it wraps are one optimizer, with one clock.
            inner = _torch.stepping(optimizer)
            if inner is not optimizer:
                return None if inner is None else self.meet(inner)
        if owner is not None and owner.params == size:
            return owner
        if owner is None and self._foreign.get(optimizer) == size:
            return None
        tensors = self._held(optimizer, size)
        if not tensors:
            self._foreign[optimizer] = size
            return None
        if owner is None and self._is_inner(tensors):
            return None
        if owner is None:
            self._check(optimizer, tensors)
            if not self._owners:
                self._first_owner()
            owner = Owner(Clock(self._state.clocks.start), self._hooks_on(optimizer), size)
            weakref.finalize(optimizer, _call, weakref.WeakMethod(self._left)).atexit = False
            self._owners[optimizer] = owner
        owner.params, owner.tensors, owner.version = size, tuple(tensors), -1
        self._claim(owner)
        return owner

    def _left(self) -> None:
        self._gone()

    def _hooks_on(self, optimizer: Optimizer) -> tuple[RemovableHandle, ...]:
        return (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def newest_hook(self, optimizer: Optimizer) -> int:
        """Return the number of the newest hook on an optimizer, -1 where there is none."""
        owner = self._owners.get(optimizer)
        return -1 if owner is None else max(handle.id for handle in owner.handles)

    def go_last(self, optimizer: Optimizer) -> None:
        """Take the hooks on an optimizer off and put them on anew, after all others."""
        if (owner := self._owners.get(optimizer)) is not None:
            for handle in owner.handles:
                handle.remove()
            owner.handles = self._hooks_on(optimizer)

    def _held(self, optimizer: Optimizer, size: int) -> list[int]:
        """Return the tensors of the session that an optimizer holds."""
        params = optimizers.params_of(optimizer)
        if any(_dist.is_flattened(param) for param in params):
            self._recheck()
        tensors = self._state.targets.owned(params)
        if len(tensors) < size:
            # Of another model, or of this one, but unknown.
            self._new_params()
            tensors = self._state.targets.owned(params)
        return tensors

    def _is_inner(self, tensors: Iterable[int]) -> bool:
        """Tell whether an optimizer is stepped by one that owns its parameters and is stepping now.

        `ZeroRedundancyOptimizer` has one inside for the part of the weights that is this rank's.
        """
        running = self._running
        if running is None or not _is_below(sys._getframe(1), running.frame):  # noqa: SLF001 # as below
            return False
        return set(tensors) <= set(running.clock.tensors)

    def _check(self, optimizer: Optimizer, tensors: Iterable[int]) -> None:
        """Refuse an optimizer that no gradient can be hidden from.

        Raises:
            BindError: naming the rule.
        """
        own = set(tensors)
        rules = [stage.rule for stage in self._state.program.freezes if own & set(stage.tensors)]
        optimizers.refuse_freeze(optimizer, rules)

    def _refuse_inside(self, owner: Owner) -> None:
        """Refuse what needs all gradients together, where each is consumed as soon as it is there.

        Raises:
            BindError: naming the rules.
        """
        own = set(owner.tensors)
        program = self._state.program
        stages = (*program.after_backward, *program.at_step)
        refused = [
            stage.rule
            for stage in stages
            if own & set(stage.tensors)
            and (stage.rule.role in ("trap", "freeze") or getattr(stage.rule, "per", "") == "rule")
        ]
        refused += [rule for rule, _ in program.site_rules if rule.role == "trap"]
        optimizers.refuse_inside_backward(refused)

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
        if optimizers.only_makes_state(optimizer):
            return None
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
        inside = _torch.graph_task() != -1
        if inside:
            self._refuse_inside(owner)
        running = self._running = Running(frame, owner.clock, inside=inside)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._act(optimizer, running, alone=True)
            return None
        if not optimizers.evaluates_before_moving(optimizer):
            running.snapshot = optimizers.snapshot(optimizer)
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

    def _act(self, optimizer: Optimizer, running: Running, *, alone: bool = False) -> None:
        if not self._state.paused:
            check_capture(self._state)
        # A fused optimizer gets scaled gradients, and the scaler's word on whether they overflowed.
        self._state.scaling.at_step = getattr(optimizer, "grad_scale", None)
        overflow = getattr(optimizer, "found_inf", None)
        scaled = self._state.scaling.stepping is not None
        if overflow is not None and scaled and bool(overflow):
            running.scaled_away = True
            return
        # With a closure, or under a scaler, more than the weights depends on what is decided.
        flagged = (
            alone
            and overflow is None
            and self._state.scaling.at_step is None
            and not (running.inside or scaled)
            and bool(self._state.program.traps)
            and optimizers.obeys_flag(optimizer)
        )
        verdict = self._judge(running.clock, inside=running.inside, flagged=flagged)
        if verdict.error is not None:
            self._undo(optimizer, running)
            self._end(running)
            raise verdict.error
        if verdict.flag is not None:
            running.flagged = optimizer
            _torch.set_found_inf(optimizer, verdict.flag)
        elif verdict.skip:
            running.skipped = True
            self._undo(optimizer, running)
            # A gradient of zero would still decay the weight and feed the moments; none at all is
            # what optimizers leave alone.
            self._hide(running, optimizers.params_of(optimizer))
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
        optimizers.restore(optimizer, running.snapshot)

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
            self._finished(running.clock, took_place=took_place, inside=running.inside)

    def _forget_failed(self) -> None:
        """Let go of a step that raised: its frame keeps alive whatever the script had at hand."""
        running = self._running
        if running is not None and not _is_below(sys._getframe(), running.frame):  # noqa: SLF001
            self._end(running, took_place=False)

    def _restore(self, running: Running) -> None:
        for param, grad in running.hidden:
            if param.grad is None:
                param.grad = grad
        running.hidden.clear()
        if running.flagged is not None:
            _torch.clear_found_inf(running.flagged)
            running.flagged = None


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (found := method()) is not None:
        found()


def _is_below(frame: FrameType | None, outer: FrameType) -> bool:
    """Tell whether ``outer`` is still running, somewhere below ``frame`` on the stack."""
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False
