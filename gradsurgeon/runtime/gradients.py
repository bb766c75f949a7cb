"""Gradients as they are at one moment, in true units, for all rules that look at them or edit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.runtime.context import Context
from gradsurgeon.tensors import measure
from gradsurgeon.tensors.loss_scale import unscaled
from gradsurgeon.tensors.measure import Norms


class Gradients:
    """The gradients that a backward pass has left, or that an update is about to consume.

    ``scale`` is what a `GradScaler` has multiplied them by.
    """

    def __init__(self, context: Context, tensors: Iterable[int], scale: Tensor | None) -> None:
        self._context = context
        self._now = dict(zip(*context.parameters.grads(tensors), strict=True))
        self._scale = scale
        # The norms that have been taken, and where that of each tensor stands.
        self._norms: Norms = ()
        self._measured: dict[int, int] = {}
        # Those that belong to this parameter alone, so that they may be written.
        self._ours: set[int] = set()
        self._twice: set[int] | None = None

    def __len__(self) -> int:
        return len(self._now)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._now

    def __getitem__(self, tensor: int) -> Tensor:
        return self._now[tensor]

    def having(self, tensors: Iterable[int]) -> list[int]:
        return [tensor for tensor in tensors if tensor in self._now]

    def of(self, tensors: Iterable[int]) -> list[Tensor]:
        return list(map(self._now.__getitem__, tensors))

    def unscaled(self, tensors: Iterable[int]) -> list[Tensor]:
        """Return gradients in true units, to be read."""
        return [unscaled(grad, self._scale) for grad in self.of(tensors)]

    def take_norms(self, tensors: Sequence[int]) -> Norms:
        """Take the 2-norms of what this rank holds of gradients that no rule has edited yet.

        Of what is not divided over ranks, later rules need not do so again.
        """
        grads = self.of(tensors)
        norms = measure.norms_here(tensors, grads, scale=self._scale)
        if not _dist.any_sharded(grads):
            self._norms = norms
            self._measured = {tensor: place for place, tensor in enumerate(tensors)}
        return norms

    def norms(self, tensors: Sequence[int], order: float) -> Tensor:
        """Return the norms of some gradients as they are by now, float32."""
        known = self._norms
        if (
            order != 2.0  # noqa: PLR2004 # l2
            or not self._measured.keys() >= set(tensors)
            or not self._ours.isdisjoint(tensors)
        ):
            known = measure.norms(tensors, self.of(tensors), order, scale=self._scale)
        if len(known) != 1:
            # Several devices: one record needs one place, and that is the host.
            by_tensor = measure.as_dict(known)
            return torch.tensor([by_tensor[tensor] for tensor in tensors])
        ((measured, values),) = known
        if len(measured) == len(tensors):
            return values
        places = tuple([self._measured[tensor] for tensor in tensors])
        return values[_torch.integers(places, values.device)]

    def statistics(self, stat: str, tensors: Sequence[int]) -> Tensor:
        if stat == "l2":
            return self.norms(tensors, 2.0)
        with torch.no_grad():
            return measure.statistics(stat, self.unscaled(tensors))

    def parts(self, stat: str, tensors: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return gradients, and what merging a statistic over ranks needs of the shards that this rank holds.

        A collective only for gradients that await a sum over ranks.

        Returns:
            The gradients with these sums carried out, and numbers of shape ``[len(tensors), k]``.
        """
        with torch.no_grad():
            grads = list(map(_dist.settled, self.unscaled(tensors)))
            return grads, measure.parts(stat, grads)

    @contextmanager
    def in_true_units(self, edited: Iterable[int]) -> Iterator[None]:
        """Take the scale of a `GradScaler` off while rules edit, which a fused optimizer divides by."""
        if (scale := self._scale) is None:
            yield
            return
        written = self.having(edited) if self._context.mode == "act" else []
        scaled = dict(zip(written, self.writable(written), strict=True))
        # In float32: half precision cannot hold the scale, nor what is small without it.
        self._now = {tensor: unscaled(grad, scale) for tensor, grad in self._now.items()}
        self._scale = None
        try:
            yield
        finally:
            for tensor, grad in scaled.items():
                grad.copy_(self._now[tensor] * scale.to(grad.device))

    def writable(self, tensors: Collection[int]) -> list[Tensor]:
        """Return gradients that may be written: those that the optimizer gets, and nobody else.

        Where rules only observe, copies that nobody gets at all.
        """
        fresh = [tensor for tensor in tensors if tensor not in self._ours]
        self._ours.update(fresh)
        grads, twice = self.of(fresh), self._held_twice() if fresh else ()
        observing, sharded = self._context.mode == "observe", _dist.any_sharded(grads)
        # The memory of the part of a shard is always that of another tensor.
        shared = [False] * len(grads) if sharded else _torch.share_storage(grads)
        for tensor, grad, is_shared in zip(fresh, grads, shared, strict=True):
            editable = grad
            if observing:
                editable = grad.detach().clone()
            elif grad.requires_grad:
                # With a graph (`create_graph=True`) it is a value that the graph still needs. Optimizers of second
                # order differentiate it: the copy keeps the graph, so they get the Hessian of the loss.
                with torch.enable_grad():
                    editable = grad.clone()
            elif is_shared or tensor in twice:
                editable = grad.clone()
            if sharded:
                # A bound on addends is no bound on their sum.
                editable = _dist.settled(editable)
            if editable is not grad:
                self._now[tensor] = editable
                param = self._context.parameters.param(tensor)
                if param is not None and not observing:
                    param.grad = editable
        return self.of(tensors)

    def _held_twice(self) -> set[int]:
        """Return the tensors whose gradient is that of another parameter as well."""
        if self._twice is None:
            parameters = self._context.parameters
            everything, grads = parameters.grads()
            self._twice = set()
            if len(set(map(id, grads))) < len(grads):
                holders = Counter(map(id, grads))
                several = zip(everything, grads, strict=True)
                self._twice = {tensor for tensor, grad in several if holders[id(grad)] > 1}
        return self._twice
