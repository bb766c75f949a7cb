"""The gradients at one moment, in true units, for all rules that read or edit them."""

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
    """The gradients that a backward pass left, or that an update is about to consume.

    ``scale`` is the factor by which a `GradScaler` multiplied the gradients.
    """

    def __init__(self, context: Context, tensors: Iterable[int], scale: Tensor | None) -> None:
        self._context = context
        self._now = dict(zip(*context.parameters.grads(tensors), strict=True))
        self._scale = scale
        # The measured norms, and the position of each tensor among them.
        self._norms: Norms = ()
        self._measured: dict[int, int] = {}
        # Tensors whose gradient belongs to this parameter alone, so rules may write to it.
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
        """Return gradients in true units, for reading only."""
        return [unscaled(grad, self._scale) for grad in self.of(tensors)]

    def take_norms(self, tensors: Sequence[int]) -> Norms:
        """Measure the 2-norms of this rank's parts of gradients that no rule has edited yet.

        If no gradient is sharded over ranks, later rules reuse the norms.
        """
        grads = self.of(tensors)
        norms = measure.norms_here(tensors, grads, scale=self._scale)
        if not _dist.any_sharded(grads):
            self._norms = norms
            self._measured = {tensor: place for place, tensor in enumerate(tensors)}
        return norms

    def norms(self, tensors: Sequence[int], order: float) -> Tensor:
        """Return the current norms of some gradients, float32."""
        known = self._norms
        if (
            order != 2.0  # noqa: PLR2004 # l2
            or not self._measured.keys() >= set(tensors)
            or not self._ours.isdisjoint(tensors)
        ):
            known = measure.norms(tensors, self.of(tensors), order, scale=self._scale)
        if len(known) != 1:
            # Norms of several devices: one record needs them on one device, and that is the host.
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
        """Return gradients, and the numbers from this rank's shards from which ranks merge a statistic.

        Runs a collective only for gradients that await a sum over ranks.

        Returns:
            The gradients after such sums, and numbers of shape ``[len(tensors), k]``.
        """
        with torch.no_grad():
            grads = list(map(_dist.settled, self.unscaled(tensors)))
            return grads, measure.parts(stat, grads)

    @contextmanager
    def in_true_units(self, edited: Iterable[int]) -> Iterator[None]:
        """Unscale the gradients while rules edit, and rescale them after: a fused optimizer divides by the scale."""
        if (scale := self._scale) is None:
            yield
            return
        written = self.having(edited) if self._context.mode == "act" else []
        scaled = dict(zip(written, self.writable(written), strict=True))
        # In float32: half precision cannot hold the scale, nor small unscaled gradients.
        self._now = {tensor: unscaled(grad, scale) for tensor, grad in self._now.items()}
        self._scale = None
        try:
            yield
        finally:
            for tensor, grad in scaled.items():
                grad.copy_(self._now[tensor] * scale.to(grad.device))

    def writable(self, tensors: Collection[int]) -> list[Tensor]:
        """Return gradients that rules may write to: the optimizer gets them, and nothing else shares them.

        Under ``mode="observe"``, these are copies that only the rules see.
        """
        fresh = [tensor for tensor in tensors if tensor not in self._ours]
        self._ours.update(fresh)
        grads, twice = self.of(fresh), self._held_twice() if fresh else ()
        observing, sharded = self._context.mode == "observe", _dist.any_sharded(grads)
        # A local shard always shares its storage with the DTensor, so the storage count proves nothing.
        shared = [False] * len(grads) if sharded else _torch.share_storage(grads)
        for tensor, grad, is_shared in zip(fresh, grads, shared, strict=True):
            editable = grad
            if observing:
                editable = grad.detach().clone()
            elif grad.requires_grad:
                # Under `create_graph=True` the graph still needs the value of the gradient. A second-order optimizer
                # differentiates the gradient: the copy keeps the graph, so it gets the Hessian of the loss.
                with torch.enable_grad():
                    editable = grad.clone()
            elif is_shared or tensor in twice:
                editable = grad.clone()
            if sharded:
                # Gradients that await a sum over ranks are summed first: a bound on addends does not bound their sum.
                editable = _dist.settled(editable)
            if editable is not grad:
                self._now[tensor] = editable
                param = self._context.parameters.param(tensor)
                if param is not None and not observing:
                    param.grad = editable
        return self.of(tensors)

    def _held_twice(self) -> set[int]:
        """Return the tensors whose gradient object is also the gradient of another parameter."""
        if self._twice is None:
            parameters = self._context.parameters
            everything, grads = parameters.grads()
            self._twice = set()
            if len(set(map(id, grads))) < len(grads):
                holders = Counter(map(id, grads))
                several = zip(everything, grads, strict=True)
                self._twice = {tensor for tensor, grad in several if holders[id(grad)] > 1}
        return self._twice
