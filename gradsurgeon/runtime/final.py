"""The final gradients of one update, as the rules at `step` see them one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon.actions import Edit
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.deciding import after
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import pick
from gradsurgeon.runtime.state import State

Range = tuple[float, float]


class Finals:
    """The gradients that an update is about to consume, in true units.

    Args:
        state: what the parts of a session share.
        grads: by tensor, those that a rule at `step` acts on.
        look: what was seen of them after backward.
    """

    def __init__(self, state: State, grads: dict[int, Tensor], look: Look | None) -> None:
        self._state = state
        self._now = grads
        self._look = look
        self._ours: set[int] = set()
        self._ranges: dict[int, Range] = {}
        self._scale = state.scaling.at_step
        self._scaled: set[int] = set()
        self._aliased: set[int] | None = None
        self._twice: set[int] | None = None
        # Those that were unchanged since the look when it was asked; the others are not known.
        self._as_seen: frozenset[int] | None = None
        self._shortened: set[int] = set()

    def __getitem__(self, tensor: int) -> Tensor:
        return self._now[tensor]

    def having(self, tensors: Iterable[int]) -> list[int]:
        """Return the tensors that have a gradient."""
        return [tensor for tensor in tensors if tensor in self._now]

    def of(self, tensors: Iterable[int]) -> list[Tensor]:
        """Return the gradients of some tensors."""
        return list(map(self._now.__getitem__, tensors))

    def unscale(self, edited: frozenset[int]) -> None:
        """Take the scale of a `GradScaler` off, which a fused optimizer gets its gradients with.

        It is a power of two, so that dividing and multiplying lose nothing.
        """
        if self._scale is None:
            return
        acting = self._state.mode == "act"
        self._scaled = set(edited) & self._now.keys() if acting else set()
        self.writable(self._scaled)
        for tensor, grad in self._now.items():
            factor = self._scale.to(grad.device)
            self._now[tensor] = grad.div_(factor) if tensor in self._scaled else grad / factor
        self._look = None

    def rescale(self) -> None:
        """Put the scale back on."""
        for tensor in self._scaled:
            grad = self._now[tensor]
            grad.mul_(cast("Tensor", self._scale).to(grad.device))

    def writable(self, tensors: Iterable[int]) -> list[Tensor]:
        """Return gradients that may be written: those that the optimizer gets, and nobody else.

        Where rules only observe, copies that nobody gets at all.
        """
        fresh = [tensor for tensor in tensors if tensor not in self._ours]
        if fresh and self._look is not None and self._as_seen is None:
            self._as_seen = self._unchanged(self._look)
        self._ours.update(fresh)
        grads = self.of(fresh)
        if self._state.mode == "observe":
            self._now.update(zip(fresh, [grad.clone() for grad in grads], strict=True))
        elif _dist.any_sharded(grads):
            for tensor, grad in zip(fresh, grads, strict=True):
                shared = tensor in self._overlapping() or _is_shared(grad)
                self._take(tensor, grad, shared=shared)
        elif fresh:
            twice = self._held_twice()
            for tensor, grad in zip(fresh, grads, strict=True):
                shared = id(grad) in twice or _is_shared(grad)
                # A gradient with a graph (`create_graph=True`) is a value that the graph still needs.
                if shared or grad.requires_grad or grad.layout != torch.strided:
                    self._take(tensor, grad, shared=shared)
        return self.of(tensors)

    def _take(self, tensor: int, grad: Tensor, *, shared: bool) -> None:
        """Give a tensor a gradient of its own where others share its memory, or a graph needs it."""
        graph = grad.requires_grad or grad.grad_fn is not None
        # A bound on addends is no bound on their sum.
        own = _dist.settled(grad.detach().clone() if graph or shared else grad)
        self._now[tensor] = own
        param = self._state.targets.param(tensor)
        if param is not None and param.grad is not own:
            param.grad = own

    def _held_twice(self) -> set[int]:
        """Return the ids of gradients that are those of several parameters."""
        if self._twice is None:
            targets = self._state.targets
            ids = list(map(id, targets.grads(range(len(targets)))[1]))
            several = len(set(ids)) < len(ids)
            found = Counter(ids).items() if several else ()
            self._twice = {one for one, count in found if count > 1}
        return self._twice

    def _overlapping(self) -> set[int]:
        """Return the tensors whose parts share memory: they lie side by side in one buffer by design."""
        if self._aliased is None:
            targets = self._state.targets
            everything, grads = targets.grads(range(len(targets)))
            parts = [_dist.local(grad) for grad in grads]
            self._aliased = {everything[position] for position in _torch.overlapping(parts)}
        return self._aliased

    def norms(self, tensors: Sequence[int], order: float) -> Tensor:
        """Return the norms of some gradients, float32: as seen after backward, where they still hold."""
        look = self._look
        if look is not None and order == 2.0 and self._ours.isdisjoint(tensors):  # noqa: PLR2004 # l2
            if self._as_seen is None:
                self._as_seen = self._unchanged(look)
            if self._as_seen.issuperset(tensors):
                return pick(look.norms, tensors)
        return pick(measure.norms(tensors, self.of(tensors), order), tensors)

    def _unchanged(self, look: Look) -> frozenset[int]:
        """Return the tensors whose gradient is as it was seen after backward."""
        stale = look.stale(list(self._now), list(self._now.values()))
        return frozenset(self._now) - stale

    def shortened(self, tensors: Sequence[int]) -> None:
        """Note that gradients were multiplied by at most 1: what was finite still is."""
        self._shortened.update(tensors)
        for tensor in tensors:
            self._ranges.pop(tensor, None)

    def tell_look(self, suspicious: set[int]) -> None:
        """Tell what was seen after backward that a change since was ours, and can have spoilt nothing."""
        look = self._look
        if look is None or self._as_seen is None:
            return
        safe = self._as_seen - suspicious
        if look.counts is None:
            # What became of a bad element must be looked at; a factor leaves it as it was.
            safe &= self._shortened
        else:
            safe -= look.counts.keys()
        look.follow({tensor: self._now[tensor] for tensor in safe & self._ours})

    def ranges(self, tensors: Sequence[int]) -> list[Range]:
        """Return the smallest and the largest element of some gradients on the host."""
        unknown = [tensor for tensor in tensors if tensor not in self._ranges]
        if unknown:
            found = _numbers.ranges([_dist.local(grad) for grad in self.of(unknown)])
            self._ranges.update(zip(unknown, found, strict=True))
        return [self._ranges[tensor] for tensor in tensors]

    def wrote(self, edit: Edit, tensors: Sequence[int]) -> None:
        """Keep track of the ranges of gradients that an edit has written."""
        kinds: dict[torch.dtype, list[int]] = {}
        for tensor in tensors:
            if tensor in self._ranges:
                kinds.setdefault(self._now[tensor].dtype, []).append(tensor)
        for kind, own in kinds.items():
            if edit.decided is None:
                for tensor in own:
                    del self._ranges[tensor]
            else:
                found = after(edit, [self._ranges[tensor] for tensor in own], kind)
                self._ranges.update(zip(own, found, strict=True))


def _is_shared(grad: Tensor) -> bool:
    """Tell whether the memory of a gradient is that of another tensor; of a part of a shard it is."""
    if grad.layout != torch.strided or _dist.is_sharded(grad):
        return False
    return _torch.shares_storage(grad)
