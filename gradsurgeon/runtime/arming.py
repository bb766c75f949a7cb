"""Every hook on a parameter: put on all together or not at all, taken off without a trace."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsurgeon import _dist, _torch
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
        found = []
        common = self._state.clocks.common
        wanted = self._armed if clock is None else sorted({*clock.tensors, *common.tensors})
        for tensor in wanted:
            if tensor not in self._is_armed:
                continue
            param = self._state.targets.param(tensor)
            if self._ids.get(tensor) != (None if param is None else id(param)):
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
        for tensor in self._armed:
            self.rearm(tensor)

    def carried(self, param: Tensor) -> int | None:
        """Return the tensor whose hooks a parameter carries, if it does."""
        for hook in _torch.post_accumulate_hooks(param):
            if isinstance(hook, PassHook) and hook.belongs_to(self._state):
                return hook.tensor
        return None

    def bypassed(self, arrived: set[int], clock: Clock) -> list[int]:
        """Return the tensors of a clock with a new gradient that did not come through their hooks.

        Args:
            arrived: those whose hooks were called since the last step.
            clock: whose step it is.
        """
        found = []
        for tensor in clock.tensors:
            param = self._state.targets.param(tensor)
            if param is None or tensor not in self._is_armed:
                continue
            if param.grad is not None and not _seen(param.grad) and tensor not in arrived:
                found.append(tensor)
            _see(param.grad)
        return found

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
        for tensor in self._armed:
            param = self._state.targets.param(tensor)
            if param is not None:
                _torch.forget_empty_hooks(param)
                if param.is_leaf and param.grad is not None:
                    vars(param.grad).pop(_SEEN, None)

    def _arm(self, tensor: int) -> None:
        param = self._state.targets.param(tensor)
        if param is None:
            self._ids.pop(tensor, None)
            return
        self._ids[tensor] = id(param)
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


# The address of a gradient says little: a new one is likely to get that of the old one. A word on the
# tensor itself goes with the tensor.
_SEEN = "_gradsurgeon_seen"


def _see(grad: Tensor | None) -> None:
    if grad is not None:
        setattr(grad, _SEEN, _dist.version(grad))


def _seen(grad: Tensor) -> bool:
    return bool(getattr(grad, _SEEN, None) == _dist.version(grad))
