"""The gradients at one moment, in true units, for all rules that read or edit them, and the edits."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradsurgeon.actions import ByNorm, Edit, Rule
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.tensors import _dist, _numbers, _torch, measure
from gradsurgeon.tensors.measure import Norms

LEFT_ALONE = "the norm is not finite: the gradients were left alone"


class Gradients:
    """The gradients that a backward pass left, or that an update consumes; ``scale`` is that of a `GradScaler`."""

    def __init__(self, context: Context, indices: Sequence[int], scale: Tensor | None) -> None:
        self._context = context
        self.asked = indices
        # Whether no parameter of the session is left out.
        self._is_whole = len(indices) == len(context.program.names)
        self._indices, grads = context.parameters.grads(indices)
        self._now = dict(zip(self._indices, grads, strict=True))
        self.scale = scale
        # The measured norms, and their tensors.
        self._norms: Norms = ()
        self._measured: Sequence[int] = ()
        # Tensors whose gradient belongs to this parameter alone, so rules may write to it.
        self._ours: set[int] = set()
        self._twice: set[int] | None = None

    def __len__(self) -> int:
        return len(self._now)

    def __contains__(self, index: int) -> bool:
        return index in self._now

    def __getitem__(self, index: int) -> Tensor:
        return self._now[index]

    def having(self, indices: Sequence[int]) -> Sequence[int]:
        if len(indices) == len(self._indices) and list(indices) == self._indices:  # nearly always
            return self._indices
        return [index for index in indices if index in self._now]

    def of(self, indices: Iterable[int]) -> list[Tensor]:
        return list(map(self._now.__getitem__, indices))

    def unscaled(self, indices: Iterable[int]) -> list[Tensor]:
        """Return gradients in true units, for reading only."""
        return [unscaled(grad, self.scale) for grad in self.of(indices)]

    def take_norms(self, indices: Sequence[int]) -> Norms:
        """Measure the 2-norms of this rank's parts of unedited gradients; rules reuse those of whole gradients."""
        if self._norms and not self._ours and indices == self._measured:
            return self._norms
        norms = measure.norms_here(indices, self.of(indices), scale=self.scale)
        self.know(indices, norms)
        return norms

    def know(self, indices: Sequence[int], norms: Norms) -> None:
        """Take norms of this rank's parts of these gradients, which nobody has edited since they were measured."""
        if norms is not self._norms and not _dist.any_sharded(self.of(self.having(indices))):
            self._norms, self._measured = norms, indices

    def known_norms(self, indices: Sequence[int]) -> Tensor | None:
        """Return the 2-norms of some gradients if they have been measured already, on one device and before any edit."""
        is_known = len(self._norms) == 1 and self._knows(indices)
        return self.norms(indices, 2.0) if is_known else None

    def _knows(self, indices: Sequence[int]) -> bool:
        if indices is not self._measured and not set(self._measured).issuperset(indices):
            return False
        return not self._ours or self._ours.isdisjoint(indices)

    def norms(self, indices: Sequence[int], order: float) -> Tensor:
        """Return the current norms of some gradients, float32."""
        if order == 2.0 and self._knows(indices):  # noqa: PLR2004 # l2
            known = self._norms
        else:
            known = measure.norms(indices, self.of(indices), order, scale=self.scale)
        if len(known) != 1:
            # Norms of several devices: one record needs them on one device, and that is the host.
            by_index = measure.as_dict(known)
            return torch.tensor([by_index[index] for index in indices])
        ((measured, values),) = known
        if len(measured) == len(indices):
            return values
        place = {index: number for number, index in enumerate(measured)}
        places = tuple([place[index] for index in indices])
        return values[_torch.integers(places, values.device)]

    def statistics(self, stat: str, indices: Sequence[int]) -> Tensor:
        if stat == "l2":
            return self.norms(indices, 2.0)
        with torch.no_grad():
            return measure.statistics(stat, self.unscaled(indices))

    def parts(self, stat: str, indices: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return gradients, and numbers ``[len(indices), k]`` of this rank's shards to merge a statistic from.

        Runs a collective only for gradients that await a sum over ranks.
        """
        with torch.no_grad():
            grads = list(map(_dist.settled, self.unscaled(indices)))
            return grads, measure.parts(stat, grads)

    @contextmanager
    def in_true_units(self, scale: Tensor, edited: Iterable[int]) -> Iterator[None]:
        """Unscale the gradients while rules edit, and rescale them after: a fused optimizer divides by the scale."""
        written = self.having([*edited]) if self._context.mode == "act" else []
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
        fresh = [index for index in indices if index not in self._ours]
        self._ours.update(fresh)
        grads, twice = self.of(fresh), self._held_twice() if fresh else ()
        observing, sharded = self._context.mode == "observe", _dist.any_sharded(grads)
        # A local shard always shares its storage with the DTensor, so the storage count proves nothing.
        shared = [False] * len(grads) if sharded else _torch.share_storage(grads)
        graphed = [grad for grad in grads if grad.requires_grad]
        if not (observing or sharded or twice or graphed or True in shared):  # nearly always
            return self.of(indices)
        for index, grad, is_shared in zip(fresh, grads, shared, strict=True):
            editable = grad
            if observing:
                editable = grad.detach().clone()
            elif grad.requires_grad:
                # Under `create_graph=True` the graph still needs the value of the gradient. A second-order optimizer
                # differentiates the gradient: the copy keeps the graph, so it gets the Hessian of the loss.
                with torch.enable_grad():
                    editable = grad.clone()
            elif is_shared or index in twice:
                editable = grad.clone()
            if sharded:
                # Gradients that await a sum over ranks are summed first: a bound on addends does not bound their sum.
                editable = _dist.settled(editable)
            if editable is not grad:
                self._now[index] = editable
                param = self._context.parameters.param(index)
                if param is not None and not observing:
                    param.grad = editable
        return self.of(indices)

    def _held_twice(self) -> set[int]:
        """Return the tensors whose gradient object is also the gradient of another parameter."""
        if self._twice is None:
            own = self._indices, self.of(self._indices)
            everything, grads = own if self._is_whole else self._context.parameters.grads()
            holders = Counter(map(id, grads)) if len(set(map(id, grads))) < len(grads) else {}
            several = zip(everything, grads, strict=True) if holders else ()
            self._twice = {index for index, grad in several if holders[id(grad)] > 1}
        return self._twice

    def edit(
        self, bound_rule: BoundRule, indices: Sequence[int], frozen: Collection[int] = ()
    ) -> None:
        """Edit gradients in true units; ``frozen`` ones count in no norm."""
        rule, edit = bound_rule.rule, self._context.edits[bound_rule.rule.id]
        if not rule.keeps_zero:
            for index in indices:
                check_layout(rule, self._now[index], self._context.program.names[index])
        if isinstance(edit, Edit):
            self._edit_elements(rule, edit, indices)
            return
        if edit.over_rule and frozen:
            indices = [index for index in indices if index not in frozen]
        if indices:
            self._clip(bound_rule, edit, indices)

    def _edit_elements(self, rule: Rule, edit: Edit, indices: Sequence[int]) -> None:
        edited = _dist.parts(self.writable(indices))
        if self._context.mode == "observe":
            for part in edited:
                self._context.event_log.count_changed(rule.id, changes(edit, part))
        if dense := [grad for grad in edited if grad.layout is torch.strided]:
            edit.apply_(dense)
        for grad in edited if len(dense) < len(edited) else ():
            if grad.layout is not torch.strided:
                # `copy_` keeps the tensor object, so the optimizer and the script see the edit.
                grad.copy_(_numbers.on_values(edit.apply, grad))

    def _clip(self, bound_rule: BoundRule, edit: ByNorm, indices: Sequence[int]) -> None:
        event_log, rule, step = self._context.event_log, bound_rule.rule.id, bound_rule.counter.step
        norms = self.norms(indices, edit.order)
        if edit.over_rule:
            norms = _numbers.over(norms, edit.order)
        factors = edit.factor(norms)

        def tell(norms: Tensor) -> None:
            # A sum of float32 numbers does not overflow in Python.
            if not math.isfinite(sum(norms.tolist())):
                event_log.emit("notice", LEFT_ALONE, rule=rule, step=step)
            if not _torch.is_host(factors):
                shorter = edit.factor(norms).expand(len(indices)) < 1.0
                event_log.count_changed(rule, shorter.sum())

        # Events and counts are computed on the host; norms of a device arrive there later.
        event_log.when_read(norms, tell)
        self.shorten(rule, indices, factors)

    def shorten(self, rule: str, indices: Sequence[int], factors: Tensor) -> None:
        """Multiply gradients by factors, one for all or one for each; a factor of 1 changes nothing.

        On the host, the changed gradients are counted. On a device, counting would wait, so the caller counts.
        """
        if _torch.is_host(factors):
            numbers = factors.tolist()
            biting = [*indices] if min(numbers) < 1.0 else []
            if biting and len(numbers) > 1:
                biting = [i for i, factor in zip(indices, numbers, strict=True) if factor < 1.0]
            self._context.event_log.count_changed(rule, len(biting))
            if biting:
                shortening = [factor for factor in numbers if factor < 1.0]
                _numbers.scale_(_dist.parts(self.writable(biting)), shortening)
            return
        parts = _dist.parts(self.writable(indices))
        if len(factors) == 1:
            _numbers.multiply_(parts, factors)
            return
        for part, factor in zip(parts, factors.unsqueeze(1).unbind(), strict=True):
            _numbers.multiply_([part], factor)


def changes(edit: Edit, grad: Tensor) -> Tensor:
    """Return whether an edit would change an element, as a 0-dim bool tensor that may be on a device."""
    elements = _numbers.values(grad)
    return _numbers.differs(elements, edit.apply(elements)).any()


def check_layout(rule: Rule, grad: Tensor, name: str) -> None:
    """Refuse an edit that would fill a sparse gradient, which binding could not foresee."""
    if grad.layout != torch.strided and not rule.keeps_zero:
        raise GradSurgeonError(
            f"rule {rule.id}: the gradient of {name} is sparse and the bounds exclude 0, so the result "
            "would be dense; include 0 in the bounds, or `exclude` the parameter"
        )


class NormClip:
    """Clips one tensor of any layout by its norm, out of place: autograd may share the tensor."""

    def __init__(self, by_norm: ByNorm, tensor: Tensor, scale: Tensor | None) -> None:
        with torch.no_grad():
            self._norm = _numbers.norm(unscaled(tensor, scale), by_norm.order)
            factor = by_norm.factor(self._norm)
        # On a device the factor stays unread.
        self._factor: float | Tensor = float(factor) if _torch.is_host(factor) else factor

    def of(self, tensor: Tensor) -> Tensor:
        if isinstance(self._factor, float) and not self._factor < 1.0:
            return tensor
        return _numbers.on_values(self._times, tensor)

    def _times(self, values: Tensor) -> Tensor:
        if isinstance(self._factor, float):
            return values * self._factor
        # Half precision would round the factor. Two 0-dim tensors promote to the wider dtype, so the result is cast.
        wide = _numbers.in_float32(values)
        return (wide * self._factor).to(values.dtype)

    def tell(self, context: Context, rule: str, step: int) -> None:
        context.event_log.count_changed(rule, self._factor < 1.0)
        if not isinstance(self._factor, float) or self._factor == 1.0:
            spoilt = self._norm.isfinite().logical_not_()
            context.event_log.emit_if(spoilt, LEFT_ALONE, rule=rule, step=step)
