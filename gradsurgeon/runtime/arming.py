"""Every hook on a parameter: put on all together or not at all, taken off without a trace."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsurgeon import _dist, _torch
from gradsurgeon.runtime.backward import PassHook, TensorHook
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.manual import GuardHook
from gradsurgeon.runtime.passes import Passes
from gradsurgeon.runtime.state import State


class Arming:
    """The hooks of one session on the parameters of its model."""

    def __init__(self, state: State, passes: Passes) -> None:
        self._state = state
        self._passes = passes
        program = state.program
        # Rules on modules alone must learn of backward passes as well.
        self._armed = program.armed or tuple(range(len(program.names)))
        self._is_armed = frozenset(self._armed)
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._ids: dict[int, int] = {}
        self._guards: dict[int, bool] = {}
        # For each clock the tensors whose hooks are on, where it is not all of them.
        self._kept: dict[Clock, tuple[int, ...]] = {}
        # Those whose hooks are off, to be known again wherever the model has them by then. Without
        # hooks of ours nothing leads from them to the session, so that it may hold them.
        self._resting: dict[int, Tensor] = {}
        # A pass must be noticed where rules act on what modules hand on.
        self._may_rest = not (program.modules or program.tags)
        # For each clock which gradients were seen in its last step, by id.
        self._last: dict[Clock, tuple[tuple[int, ...], list[int]]] = {}
        self._own: dict[Clock, tuple[tuple[int, ...], frozenset[int]]] = {}

    def arm(self) -> None:
        """Put hooks on all tensors of the program; on failure none stays."""
        with ExitStack() as undo:
            undo.callback(self.disarm)
            for grad in self._state.targets.grads(self._armed)[1]:
                _see(grad)  # what was there before the hooks did not have to pass them
            for tensor in self._armed:
                self._arm(tensor)
            undo.pop_all()

    def guard(self, tensors: dict[int, bool]) -> None:
        """Put guards on tensors whose steps are counted by backward passes."""
        self._guards = tensors
        for tensor in tensors:
            if (param := self._state.targets.param(tensor)) is not None:
                self._handles.setdefault(tensor, []).append(self._put_guard(tensor, param))

    def replaced(self, clock: Clock | None = None) -> list[int]:
        """Return the tensors, of a clock or of all, whose parameter is not the one with the hooks.

        A parameter that is gone from the model is in no optimizer's care.
        """
        places = self._state.targets.places_of(self._armed)
        if [id(owner.get(key)) for owner, key in places] == list(self._ids.values()):
            return []
        found = []
        common = self._state.clocks.common
        wanted = self._armed if clock is None else sorted({*clock.tensors, *common.tensors})
        for tensor in wanted:
            if tensor not in self._ids:
                continue
            param = self._state.targets.param(tensor)
            if self._ids[tensor] != id(param):
                found.append(tensor)
        return found

    def rearm(self, tensor: int) -> bool:
        """Put the hooks on the parameter that now stands under the name.

        Returns:
            Whether there is one.
        """
        for handle in self._handles.pop(tensor, []):
            handle.remove()
        self._arm(tensor)
        return self._state.targets.param(tensor) is not None

    def again(self) -> None:
        """Take all hooks off and put them on anew: they now come after all others."""
        self._kept.clear()
        for tensor in self._armed:
            self.rearm(tensor)

    def carried(self, param: Tensor) -> int | None:
        """Return the tensor whose hooks a parameter carries, if it does."""
        for hook in _torch.post_accumulate_hooks(param):
            if isinstance(hook, PassHook) and hook.belongs_to(self._state):
                return hook.tensor
        return next((tensor for tensor, one in self._resting.items() if one is param), None)

    def keep(self, clock: Clock, wanted: tuple[int, ...]) -> None:
        """Have hooks on no other tensors of a clock than those that its next step needs.

        A hook that has nothing to do costs as much as one that notes an arrival. One that the script
        has put others behind stays: it would come back after them.
        """
        if self._kept.get(clock) is wanted or not self._may_rest:
            return
        self._kept[clock] = wanted
        for tensor in self._of(clock):
            self._switch(tensor, on=tensor in wanted)

    def keep_all(self) -> None:
        """Have hooks on all tensors: whose step comes next is not known any more."""
        for clock in list(self._kept):
            self.keep(clock, self._armed)
        self._kept.clear()

    def _switch(self, tensor: int, *, on: bool) -> None:
        param, handles = self._state.targets.param(tensor), self._handles.get(tensor)
        if param is None or on == bool(handles):
            return
        if on:
            _see(param.grad)
            self._arm(tensor)
        elif handles and _torch.is_newest_hook(param, handles):
            for handle in self._handles.pop(tensor):
                handle.remove()
            _torch.forget_empty_hooks(param)
            self._resting[tensor] = param

    def bypassed(self, arrived: set[int], clock: Clock, seen: Look | None) -> list[int]:
        """Return the tensors of a clock with a new gradient that did not come through their hooks.

        Args:
            arrived: those whose hooks were called since the last step.
            clock: whose step it is.
            seen: what was seen last.
        """
        found = []
        missing = self._of(clock).difference(arrived).intersection(self._handles)
        last = dict(zip(*self._last[clock], strict=True)) if missing and clock in self._last else {}
        for tensor in missing:
            param = self._state.targets.param(tensor)
            if param is None or (grad := param.grad) is None:
                continue
            # What was there in the step before, and arrives no more, is no new gradient.
            if not _seen(grad) and id(grad) != last.get(tensor):
                found.append(tensor)
            _see(grad)
        if clock is self._state.clocks.common:
            # An optimizer may turn up and take these very gradients for its own step.
            for grad in self._state.targets.grads(self._of(clock))[1]:
                _see(grad)
        elif seen is not None:
            self._last[clock] = seen.tensors, seen.marks[0]
        return sorted(found)

    def _of(self, clock: Clock) -> frozenset[int]:
        known = self._own.get(clock)
        if known is None or known[0] is not clock.tensors:
            known = clock.tensors, self._is_armed.intersection(clock.tensors)
            self._own[clock] = known
        return known[1]

    def revive(self, tensor: int) -> None:
        """Install the hooks of a parameter anew."""
        if (param := self._state.targets.param(tensor)) is not None:
            _torch.reinstall_hooks(param)

    def disarm(self) -> None:
        """Take all hooks off."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._resting.clear()
        for tensor in self._armed:
            param = self._state.targets.param(tensor)
            if param is not None:
                _torch.forget_empty_hooks(param)
                if param.is_leaf and param.grad is not None:
                    vars(param.grad).pop(_SEEN, None)

    def _arm(self, tensor: int) -> None:
        param = self._state.targets.param(tensor)
        self._resting.pop(tensor, None)
        self._ids[tensor] = id(param)
        if param is None:
            return
        self._handles[tensor] = list(self._put(tensor, param))

    def _put(self, tensor: int, param: Tensor) -> Iterable[RemovableHandle]:
        if param.is_inference() or not (param.is_floating_point() or param.is_complex()):
            return  # Integers and tensors made for inference have no gradient, now or later.
        name = self._state.program.names[tensor]
        rules = self._state.program.per_tensor.get(tensor, ())
        frozen = not param.requires_grad
        if frozen:
            # torch refuses hooks on frozen parameters, but keeps those that are there, so that a
            # rule acts as soon as the parameter is thawed.
            param.requires_grad_(True)
        try:
            if rules:
                label = "+".join(rule.id for rule in rules)
                own = self._state.program.in_hook[tensor]
                hook = TensorHook(self._state, self._passes, tensor, f"{label}:{name}", own)
                yield _torch.register_hook(param, hook)
            if tensor in self._guards:
                yield self._put_guard(tensor, param)
            watch = PassHook(self._state, self._passes, tensor, f"gradsurgeon:{name}")
            yield _torch.register_post_accumulate_hook(param, watch)
        finally:
            if frozen:
                param.requires_grad_(False)

    def _put_guard(self, tensor: int, param: Tensor) -> RemovableHandle:
        name = self._state.program.names[tensor]
        edited = self._guards[tensor]
        guard = GuardHook(self._state, self._passes, tensor, f"gradsurgeon:{name}", edited=edited)
        return _torch.register_hook(param, guard)


# The address of a gradient says little: a new one is likely to get that of the old one. A word on the
# tensor itself goes with the tensor.
_SEEN = "_gradsurgeon_seen"


def _see(grad: Tensor | None) -> None:
    if grad is not None:
        setattr(grad, _SEEN, _dist.version(grad))


def _seen(grad: Tensor) -> bool:
    return bool(getattr(grad, _SEEN, None) == _dist.version(grad))
