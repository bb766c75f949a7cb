"""The gradients at one moment, in true units, for all rules that read or edit them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradsurgeon.actions import Rule
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.device_outcome import DeviceOutcome
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.tensors import _dist, _numbers, _torch, measure
from gradsurgeon.tensors.measure import Norms

LEFT_ALONE = "the norm is not finite: the gradients were left alone"


class Gradients:
    """The gradients that a backward pass left, or that an update consumes; ``scale`` is that of a `GradScaler`."""

    def __init__(self, context: Context, indices: Sequence[int], scale: Tensor | None) -> None:
        self.context = context
        # Whether no parameter of the session is left out.
        self._is_whole = len(indices) == len(context.names)
        # The parameters that have a gradient.
        self.indices, grads = context.parameters.grads(indices)
        self._now = dict(zip(self.indices, grads, strict=True))
        # Whether this rank holds only a part of some gradient.
        self.are_sharded = _dist.any_sharded(grads)
        self.scale = scale
        # The parameters that the optimizer does not find in this update.
        self.hidden: Collection[int] = ()
        # The host learns this later if only the device knows whether the update takes place.
        self.outcome: DeviceOutcome | None = None
        # The measured norms, and their tensors.
        self._norms: Norms = ()
        self._measured: Sequence[int] = ()
        # Parameters whose gradient no other tensor shares by now, so rules may write to it, or have.
        self._writable_now: set[int] = set()
        self._twice: set[int] | None = None

    def __contains__(self, index: int) -> bool:
        return index in self._now

    def __getitem__(self, index: int) -> Tensor:
        return self._now[index]

    def having(self, indices: Sequence[int]) -> Sequence[int]:
        if len(indices) == len(self.indices) and list(indices) == self.indices:  # nearly always
            return self.indices
        return [index for index in indices if index in self._now]

    def grads_of(self, indices: Iterable[int]) -> list[Tensor]:
        return list(map(self._now.__getitem__, indices))  # no loop in Python: asked in every step

    def unscaled(self, indices: Iterable[int]) -> list[Tensor]:
        """Return gradients in true units, for reading only."""
        return [unscaled(grad, self.scale) for grad in self.grads_of(indices)]

    def take_norms(self, wanted: Sequence[int]) -> tuple[Sequence[int], Norms]:
        """Measure the 2-norms of this rank's parts of unedited gradients; rules reuse those of whole gradients.

        Return also which of the wanted parameters have a gradient.
        """
        indices = self.having(wanted)
        if self._norms and not self._writable_now and indices == self._measured:
            return indices, self._norms
        grads = self.grads_of(indices)
        if self.are_sharded:
            indices = [index for index in indices if not _dist.is_empty(self._now[index])]
            parts = _dist.parts(self.grads_of(indices))
            return indices, measure.norms(indices, parts, scale=self.scale)
        self._norms = measure.norms(indices, grads, scale=self.scale)
        self._measured = indices
        return indices, self._norms

    def known_norms(self, indices: Sequence[int]) -> Tensor | None:
        """Return the 2-norms of some gradients if they have been measured already, on one device and before any edit."""
        if len(self._norms) == 1 and self._knows(indices):
            return self.norms(indices, 2.0)
        return None

    def _knows(self, indices: Sequence[int]) -> bool:
        if indices is not self._measured and not set(self._measured).issuperset(indices):
            return False
        return not self._writable_now or self._writable_now.isdisjoint(indices)

    def norms(self, indices: Sequence[int], order: float) -> Tensor:
        """Return the current norms of some gradients, float32."""
        if order == 2.0 and self._knows(indices):  # noqa: PLR2004 # l2
            known = self._norms
        else:
            known = measure.norms(indices, self.grads_of(indices), order, scale=self.scale)
        return measure.together(known, indices)

    def statistics(self, stat: str, indices: Sequence[int]) -> Tensor:
        if stat == "l2":
            return self.norms(indices, 2.0)
        with torch.no_grad():
            return measure.statistics(stat, self.unscaled(indices))

    @_torch.without_grad
    def parts(self, stat: str, indices: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return gradients, and numbers ``[len(indices), k]`` of this rank's shards to merge a statistic from.

        Runs a collective only for gradients that await a sum over ranks.
        """
        grads = [_dist.settled(grad) for grad in self.unscaled(indices)]
        return grads, measure.parts(stat, grads)

    @contextmanager
    def in_true_units(self, scale: Tensor, edited: Iterable[int]) -> Iterator[None]:
        """Unscale the gradients while rules edit, and rescale them after: a fused optimizer divides by the scale."""
        written: Sequence[int] = []
        if self.context.acts:
            written = self.having([*edited])
        scaled = dict(zip(written, self.writable(written), strict=True))
        # In float32: half precision cannot hold the scale, nor small unscaled gradients.
        self._now = {index: unscaled(grad, scale) for index, grad in self._now.items()}
        self.scale = None
        try:
            yield
        finally:
            for index, grad in scaled.items():
                grad.copy_(self._now[index] * scale.to(grad.device))

    def writable(self, indices: Collection[int]) -> list[Tensor]:
        """Return gradients that rules may write to; copies that only the rules see under ``mode="observe"``."""
        fresh = [index for index in indices if index not in self._writable_now]
        self._writable_now.update(fresh)
        grads = self.grads_of(fresh)
        twice: Collection[int] = ()
        if fresh:
            twice = self._held_twice()
        observing = not self.context.acts
        sharded = self.are_sharded
        # A local shard always shares its storage with the DTensor, so the storage count proves nothing.
        shared = [False] * len(grads) if sharded else _torch.share_storage(grads)
        graphed = [grad for grad in grads if grad.requires_grad]
        if not (observing or sharded or twice or graphed or True in shared):  # nearly always
            return self.grads_of(indices)
        for index, grad, shares_storage in zip(fresh, grads, shared, strict=True):
            is_shared = shares_storage or index in twice
            editable = self._editable(grad, is_shared=is_shared)
            if editable is not grad:
                self._now[index] = editable
                param = self.context.parameters.param(index)
                if param is not None and not observing:
                    param.grad = editable
        return self.grads_of(indices)

    def _editable(self, grad: Tensor, *, is_shared: bool) -> Tensor:
        editable = grad
        if not self.context.acts:
            editable = grad.detach().clone()
        elif grad.requires_grad:
            # Under `create_graph=True` the graph still needs the value of the gradient. A second-order optimizer
            # differentiates the gradient: the copy keeps the graph, so it gets the Hessian of the loss.
            with torch.enable_grad():
                editable = grad.clone()
        elif is_shared:
            editable = grad.clone()
        if self.are_sharded:
            # Gradients that await a sum over ranks are summed first: a bound on addends does not bound their sum.
            return _dist.settled(editable)
        return editable

    def _held_twice(self) -> set[int]:
        """Return the tensors whose gradient object is also the gradient of another parameter."""
        if self._twice is not None:
            return self._twice
        twice = set()
        if self._is_whole:
            indices = self.indices
            grads = self.grads_of(indices)
        else:
            indices, grads = self.context.parameters.grads()
        identities = list(map(id, grads))
        if len(set(identities)) < len(grads):
            holders = Counter(identities)
            for index, identity in zip(indices, identities, strict=True):
                if holders[identity] > 1:
                    twice.add(index)
        self._twice = twice
        return twice

    def check_layouts(self, rule: Rule, indices: Iterable[int]) -> None:
        for index in indices:
            check_layout(rule, self._now[index], self.context.names[index])

    def shorten(
        self, rule: str, indices: Sequence[int], places: Sequence[int], factors: Tensor
    ) -> bool:
        """Multiply each gradient by the factor at its place; a factor of 1 changes nothing.

        Gradients of an update that is left out stay as they are.
        On the host, the changed gradients are counted. On a device, counting would wait, so the caller counts.
        Return whether they were counted.
        """
        if self.outcome is not None:
            factors = factors.masked_fill(self.outcome.left_out > 0, 1.0)
        if _torch.is_host(factors):
            numbers = factors.tolist()
            clipped = {}
            if min(numbers) < 1.0:
                for index, place in zip(indices, places, strict=True):
                    if numbers[place] < 1.0:
                        clipped[index] = numbers[place]
            self.context.event_log.count_changed(rule, len(clipped))
            if clipped:
                parts = _dist.parts(self.writable(clipped))
                _numbers.scale_(parts, list(clipped.values()))
            return True
        parts_at = defaultdict(list)
        for part, place in zip(_dist.parts(self.writable(indices)), places, strict=True):
            parts_at[place].append(part)
        for place, factor in enumerate(torch.split(factors, 1)):
            _numbers.multiply_(parts_at[place], factor)
        return False


def check_layout(rule: Rule, grad: Tensor, name: str) -> None:
    """Refuse an edit that would fill a sparse gradient, which binding could not foresee."""
    if grad.layout != torch.strided and not rule.keeps_zero:
        raise GradSurgeonError(
            f"rule {rule.id}: the gradient of {name} is sparse and the bounds exclude 0, so the result "
            "would be dense; include 0 in the bounds, or `exclude` the parameter"
        )
