"""Every hook on a parameter: put on all together or not at all, taken off without a trace."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsurgeon import _torch
from gradsurgeon.runtime.backward import PassHook, TensorHook
from gradsurgeon.runtime.clock import Clock
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
        self._own: dict[Clock, tuple[tuple[int, ...], frozenset[int]]] = {}

    def arm(self) -> None:
        """Put hooks on all tensors of the program; on failure none stays."""
        with ExitStack() as undo:
            undo.callback(self.disarm)
            for tensor in self._armed:
                self._arm(tensor)
            undo.pop_all()

    def guard(self, tensors: dict[int, bool]) -> None:
        """Put guards on tensors whose steps are counted by backward passes."""
        self._guards = tensors
        for tensor in tensors:
            if (param := self._state.targets.param(tensor)) is not None:
                self._handles.setdefault(tensor, []).append(self._put_guard(tensor, param))

    def replaced(self) -> list[int]:
        """Return the tensors whose parameter is not the one with the hooks."""
        places = self._state.targets.places_of(self._armed)
        now = [id(owner.get(key)) for owner, key in places]
        if now == list(self._ids.values()):
            return []
        armed = zip(self._armed, now, strict=True)
        return [tensor for tensor, param in armed if self._ids.get(tensor, param) != param]

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

    def on(self, clock: Clock) -> bool:
        """Tell whether hooks are on all tensors of a clock, so that a backward pass would be noticed."""
        return self._kept.get(clock, self._armed) is self._armed or bool(self._kept[clock])

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
            self._arm(tensor)
        elif handles and _torch.is_newest_hook(param, handles):
            for handle in self._handles.pop(tensor):
                handle.remove()
            _torch.forget_empty_hooks(param)
            self._resting[tensor] = param

    def missing(self, tensors: Iterable[int]) -> list[int]:
        """Return the tensors that somebody has taken our hooks off."""
        found = []
        for tensor in tensors:
            param = self._state.targets.param(tensor)
            if param is not None and self._handles.get(tensor) and not self._has_hook(param):
                found.append(tensor)
        return found

    def _has_hook(self, param: Tensor) -> bool:
        return any(
            isinstance(hook, PassHook) and hook.belongs_to(self._state)
            for hook in _torch.post_accumulate_hooks(param)
        )

    def _of(self, clock: Clock) -> frozenset[int]:
        known = self._own.get(clock)
        if known is None or known[0] is not clock.tensors:
            known = clock.tensors, self._is_armed.intersection(clock.tensors)
            self._own[clock] = known
        return known[1]

    def revive(self, param: Tensor) -> int | None:
        """Install the hooks of a parameter anew, whose content was swapped with that of another tensor.

        Returns:
            The tensor, if it is one with hooks of ours.
        """
        for tensor, identity in self._ids.items():
            same = identity == id(param) and self._state.targets.param(tensor) is param
            if same and self._handles.get(tensor):
                _torch.reinstall_hooks(param)
                return tensor
        return None

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
                hook = TensorHook(self._state, self._passes, tensor, f"{label}:{name}", rules)
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
