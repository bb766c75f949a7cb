"""Every hook on a parameter: put on all together or not at all, taken off without a trace.

A parameter has one for its rules at `backward`, and one where several ranks train. No other rule needs any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsurgeon import _dist, _torch
from gradsurgeon.errors import BindError, printable
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.param_hooks import ArrivalHook, TensorHook


class HookRegistry:
    def __init__(self, context: Context, passes: BackwardWatch) -> None:
        self._context = context
        self._backward = passes
        self._armed = context.program.watched
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._ids: dict[int, int] = {}

    def arm(self) -> None:
        for tensor in self._armed:
            self.rearm(tensor)

    def rearm(self, tensor: int) -> bool:
        """Put what hooks there are on the parameter that now has the name; tell whether one has it."""
        for handle in self._handles.pop(tensor, []):
            handle.remove()
        param = self._context.parameters.param(tensor)
        self._ids[tensor] = id(param)
        if param is not None:
            # One by one: what is on already can be taken off where the next one raises.
            self._handles.setdefault(tensor, []).extend(self._put(tensor, param))
        return param is not None

    def replaced(self) -> list[int]:
        """Return the tensors whose parameter is not the one that was armed."""
        now = list(map(id, self._context.parameters.params(self._armed)))
        if now == list(self._ids.values()):
            return []
        armed = zip(self._armed, now, strict=True)
        return [tensor for tensor, param in armed if self._ids.get(tensor, param) != param]

    def missing(self, tensors: Iterable[int]) -> list[int]:
        return [
            tensor
            for tensor in tensors
            if self._context.parameters.param(tensor) is not None
            and (handles := self._handles.get(tensor))
            and not _is_on(handles[-1])
        ]

    def revive(self, tensor: int) -> bool:
        """Install the hooks of a parameter anew whose content was swapped with that of another tensor.

        Returns:
            Whether it has any.
        """
        param = self._context.parameters.param(tensor)
        if param is None or not self._handles.get(tensor):
            return False
        _torch.reinstall_hooks(param)
        return True

    def disarm(self) -> None:
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        for param in self._context.parameters.params(self._armed):
            if param is not None:
                _torch.forget_empty_hooks(param)

    def _put(self, tensor: int, param: Tensor) -> Iterator[RemovableHandle]:
        if param.is_inference() or not (param.is_floating_point() or param.is_complex()):
            return  # Integers and tensors made for inference have no gradient, now or later.
        name = self._context.program.names[tensor]
        if not param.is_leaf:
            raise BindError(
                [f"{printable(name)} is no leaf of the graph: it never gets a gradient"]
            )
        rules = self._context.program.per_tensor.get(tensor, ())
        if not rules and _dist.world() == 1:
            return
        frozen = not param.requires_grad
        if frozen:
            # torch refuses hooks on frozen parameters, but keeps those that are there, so that a
            # rule acts as soon as the parameter is thawed.
            param.requires_grad_(True)
        try:
            if rules:
                label = "+".join(rule.id for rule in rules)
                hook = TensorHook(self._context, self._backward, tensor, f"{label}:{name}", rules)
                yield _torch.register_hook(param, hook)
            if _dist.world() > 1:
                watch = ArrivalHook(self._context, self._backward, tensor, f"gradsurgeon:{name}")
                yield _torch.register_post_accumulate_hook(param, watch)
        finally:
            if frozen:
                param.requires_grad_(False)


def _is_on(handle: RemovableHandle) -> bool:
    table = handle.hooks_dict_ref()
    return table is not None and handle.id in table
