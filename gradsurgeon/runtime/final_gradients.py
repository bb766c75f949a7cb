"""The final gradients of one update, as the rules at `step` see them one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.measure import Norms, pick
from gradsurgeon.runtime.scaler_watch import unscaled


class FinalGradients:
    """The gradients that an update is about to consume, in true units.

    Args:
        context: what the parts of a session share.
        tensors: those that some rule acts on or looks at.
        scale: what a `GradScaler` has multiplied them by, where the optimizer divides by it.
    """

    def __init__(self, context: Context, tensors: Iterable[int], scale: Tensor | None) -> None:
        self._context = context
        self._now = dict(zip(*context.parameters.grads(tensors), strict=True))
        self._scale = scale
        # The norms of gradients as the script has handed them over, once they have been taken.
        self._handed_over: Norms = ()
        self._edited: set[int] = set()
        # Those that belong to this parameter alone, so that they may be written.
        self._ours: set[int] = set()
        self._scaled: dict[int, Tensor] = {}
        self._aliased: set[int] | None = None
        self._twice: set[int] | None = None

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._now

    def __getitem__(self, tensor: int) -> Tensor:
        return self._now[tensor]

    def having(self, tensors: Iterable[int]) -> list[int]:
        return [tensor for tensor in tensors if tensor in self._now]

    def of(self, tensors: Iterable[int]) -> list[Tensor]:
        return list(map(self._now.__getitem__, tensors))

    def norms_handed_over(self, tensors: Sequence[int]) -> Norms:
        """Take the 2-norms of gradients that no rule has edited yet; later rules need not do so again."""
        self._handed_over = measure.norms(tensors, self.of(tensors), scale=self._scale)
        return self._handed_over

    def statistics(self, stat: str, tensors: Sequence[int]) -> Tensor:
        """Return one statistic of gradients as they are by now. Shape ``[len(tensors)]``, float32."""
        with torch.no_grad():
            return measure.statistics(stat, [unscaled(g, self._scale) for g in self.of(tensors)])

    def unscale(self, edited: Iterable[int]) -> None:
        """Take the scale of a `GradScaler` off, which a fused optimizer gets its gradients with."""
        if self._scale is None:
            return
        written = self.having(edited) if self._context.mode == "act" else []
        self._scaled = dict(zip(written, self._owned(written), strict=True))
        for tensor, grad in self._now.items():
            # In float32: half precision cannot hold the scale, nor what is small without it.
            self._now[tensor] = unscaled(grad, self._scale)
        self._scale = None

    def rescale(self, scale: Tensor | None) -> None:
        """Put the scale back on what was edited without it."""
        for tensor, grad in self._scaled.items():
            factor = cast("Tensor", scale).to(grad.device)
            grad.copy_(self._now[tensor] * factor)

    def writable(self, tensors: Iterable[int]) -> list[Tensor]:
        """Return gradients that may be written: those that the optimizer gets, and nobody else.

        Where rules only observe, copies that nobody gets at all.
        """
        wanted = list(tensors)
        self._edited.update(wanted)
        return self._owned(wanted)

    def _owned(self, tensors: Sequence[int]) -> list[Tensor]:
        fresh = [tensor for tensor in tensors if tensor not in self._ours]
        self._ours.update(fresh)
        grads = self.of(fresh)
        if self._context.mode == "observe":
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
        param = self._context.parameters.param(tensor)
        if param is not None and param.grad is not own:
            param.grad = own

    def _held_twice(self) -> set[int]:
        """Return the ids of gradients that are those of several parameters."""
        if self._twice is None:
            parameters = self._context.parameters
            ids = list(map(id, parameters.grads()[1]))
            several = len(set(ids)) < len(ids)
            found = Counter(ids).items() if several else ()
            self._twice = {one for one, count in found if count > 1}
        return self._twice

    def _overlapping(self) -> set[int]:
        """Return the tensors whose parts share memory: they lie side by side in one buffer by design."""
        if self._aliased is None:
            parameters = self._context.parameters
            everything, grads = parameters.grads()
            parts = [_dist.local(grad) for grad in grads]
            self._aliased = {everything[position] for position in _torch.overlapping(parts)}
        return self._aliased

    def norms(self, tensors: Sequence[int], order: float) -> Tensor:
        """Return the norms of some gradients as they are by now, float32."""
        if order == 2.0 and self._edited.isdisjoint(tensors):  # noqa: PLR2004 # l2
            known = {tensor for own, _ in self._handed_over for tensor in own}
            if known.issuperset(tensors):
                return pick(self._handed_over, tensors)
        return pick(measure.norms(tensors, self.of(tensors), order), tensors)


def _is_shared(grad: Tensor) -> bool:
    """Tell whether the memory of a gradient is that of another tensor; of a part of a shard it is."""
    if grad.layout != torch.strided or _dist.is_sharded(grad):
        return False
    return _torch.shares_storage(grad)
