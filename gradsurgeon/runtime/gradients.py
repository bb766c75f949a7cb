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

    def __init__(self, context: Context, tensors: Sequence[int], scale: Tensor | None) -> None:
        self._context = context
        self.asked = tensors
        # Whether no parameter of the session is left out.
        self._is_whole = len(tensors) == len(context.program.names)
        self._tensors, grads = context.parameters.grads(tensors)
        self._now = dict(zip(self._tensors, grads, strict=True))
        self.scale = scale
        # The measured norms, and their tensors.
        self._norms: Norms = ()
        self._measured: Sequence[int] = ()
        # Tensors whose gradient belongs to this parameter alone, so rules may write to it.
        self._ours: set[int] = set()
        self._twice: set[int] | None = None

    def __len__(self) -> int:
        return len(self._now)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._now

    def __getitem__(self, tensor: int) -> Tensor:
        return self._now[tensor]

    def having(self, tensors: Sequence[int]) -> Sequence[int]:
        if len(tensors) == len(self._tensors) and list(tensors) == self._tensors:  # nearly always
            return self._tensors
        return [tensor for tensor in tensors if tensor in self._now]

    def of(self, tensors: Iterable[int]) -> list[Tensor]:
        return list(map(self._now.__getitem__, tensors))

    def unscaled(self, tensors: Iterable[int]) -> list[Tensor]:
        """Return gradients in true units, for reading only."""
        return [unscaled(grad, self.scale) for grad in self.of(tensors)]

    def take_norms(self, tensors: Sequence[int]) -> Norms:
        """Measure the 2-norms of this rank's parts of unedited gradients; rules reuse those of whole gradients."""
        if self._norms and not self._ours and tensors == self._measured:
            return self._norms
        norms = measure.norms_here(tensors, self.of(tensors), scale=self.scale)
        self.know(tensors, norms)
        return norms

    def know(self, tensors: Sequence[int], norms: Norms) -> None:
        """Take norms of this rank's parts of these gradients, which nobody has edited since they were measured."""
        if norms is not self._norms and not _dist.any_sharded(self.of(self.having(tensors))):
            self._norms, self._measured = norms, tensors

    def known_norms(self, tensors: Sequence[int]) -> Tensor | None:
        """Return the 2-norms of some gradients if they have been measured already, on one device and before any edit."""
        is_known = len(self._norms) == 1 and self._knows(tensors)
        return self.norms(tensors, 2.0) if is_known else None

    def _knows(self, tensors: Sequence[int]) -> bool:
        if tensors is not self._measured and not set(self._measured).issuperset(tensors):
            return False
        return not self._ours or self._ours.isdisjoint(tensors)

    def norms(self, tensors: Sequence[int], order: float) -> Tensor:
        """Return the current norms of some gradients, float32."""
        if order == 2.0 and self._knows(tensors):  # noqa: PLR2004 # l2
            known = self._norms
        else:
            known = measure.norms(tensors, self.of(tensors), order, scale=self.scale)
        if len(known) != 1:
            # Norms of several devices: one record needs them on one device, and that is the host.
            by_tensor = measure.as_dict(known)
            return torch.tensor([by_tensor[tensor] for tensor in tensors])
        ((measured, values),) = known
        if len(measured) == len(tensors):
            return values
        place = {tensor: number for number, tensor in enumerate(measured)}
        places = tuple([place[tensor] for tensor in tensors])
        return values[_torch.integers(places, values.device)]

    def statistics(self, stat: str, tensors: Sequence[int]) -> Tensor:
        if stat == "l2":
            return self.norms(tensors, 2.0)
        with torch.no_grad():
            return measure.statistics(stat, self.unscaled(tensors))

    def parts(self, stat: str, tensors: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return gradients, and numbers ``[len(tensors), k]`` of this rank's shards to merge a statistic from.

        Runs a collective only for gradients that await a sum over ranks.
        """
        with torch.no_grad():
            grads = list(map(_dist.settled, self.unscaled(tensors)))
            return grads, measure.parts(stat, grads)

    @contextmanager
    def in_true_units(self, scale: Tensor, edited: Iterable[int]) -> Iterator[None]:
        """Unscale the gradients while rules edit, and rescale them after: a fused optimizer divides by the scale."""
        written = self.having([*edited]) if self._context.mode == "act" else []
        scaled = dict(zip(written, self.writable(written), strict=True))
        # In float32: half precision cannot hold the scale, nor small unscaled gradients.
        self._now = {tensor: unscaled(grad, scale) for tensor, grad in self._now.items()}
        self.scale = None
        try:
            yield
        finally:
            for tensor, grad in scaled.items():
                grad.copy_(self._now[tensor] * scale.to(grad.device))

    def writable(self, tensors: Collection[int]) -> list[Tensor]:
        """Return gradients that rules may write to; copies that only the rules see under ``mode="observe"``."""
        fresh = [tensor for tensor in tensors if tensor not in self._ours]
        self._ours.update(fresh)
        grads, twice = self.of(fresh), self._held_twice() if fresh else ()
        observing, sharded = self._context.mode == "observe", _dist.any_sharded(grads)
        # A local shard always shares its storage with the DTensor, so the storage count proves nothing.
        shared = [False] * len(grads) if sharded else _torch.share_storage(grads)
        graphed = [grad for grad in grads if grad.requires_grad]
        if not (observing or sharded or twice or graphed or True in shared):  # nearly always
            return self.of(tensors)
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
            own = self._tensors, self.of(self._tensors)
            everything, grads = own if self._is_whole else self._context.parameters.grads()
            holders = Counter(map(id, grads)) if len(set(map(id, grads))) < len(grads) else {}
            several = zip(everything, grads, strict=True) if holders else ()
            self._twice = {tensor for tensor, grad in several if holders[id(grad)] > 1}
        return self._twice

    def edit(
        self, bound_rule: BoundRule, tensors: Sequence[int], frozen: Collection[int] = ()
    ) -> None:
        """Edit gradients in true units; ``frozen`` ones count in no norm."""
        rule, edit = bound_rule.rule, self._context.edits[bound_rule.rule.id]
        if not rule.keeps_zero:
            for tensor in tensors:
                check_layout(rule, self._now[tensor], self._context.program.names[tensor])
        if isinstance(edit, Edit):
            self._edit_elements(rule, edit, tensors)
            return
        if edit.over_rule and frozen:
            tensors = [tensor for tensor in tensors if tensor not in frozen]
        if tensors:
            self._clip(bound_rule, edit, tensors)

    def _edit_elements(self, rule: Rule, edit: Edit, tensors: Sequence[int]) -> None:
        edited = _dist.parts(self.writable(tensors))
        if self._context.mode == "observe":
            for part in edited:
                self._context.event_log.count_changed(rule.id, changes(edit, part))
        if dense := [grad for grad in edited if grad.layout is torch.strided]:
            edit.apply_(dense)
        for grad in edited if len(dense) < len(edited) else ():
            if grad.layout is not torch.strided:
                # `copy_` keeps the tensor object, so the optimizer and the script see the edit.
                grad.copy_(_numbers.on_values(edit.apply, grad))

    def _clip(self, bound_rule: BoundRule, edit: ByNorm, tensors: Sequence[int]) -> None:
        event_log, rule, step = self._context.event_log, bound_rule.rule.id, bound_rule.counter.step
        norms = self.norms(tensors, edit.order)
        if edit.over_rule:
            norms = _numbers.over(norms, edit.order)
        factors = edit.factor(norms)

        def tell(norms: Tensor) -> None:
            # A sum of float32 numbers does not overflow in Python.
            if not math.isfinite(sum(norms.tolist())):
                event_log.emit("notice", LEFT_ALONE, rule=rule, step=step)
            if not _torch.is_host(factors):
                shorter = edit.factor(norms).expand(len(tensors)) < 1.0
                event_log.count_changed(rule, shorter.sum())

        # Events and counts are computed on the host; norms of a device arrive there later.
        event_log.when_read(norms, tell)
        self.shorten(rule, tensors, factors)

    def shorten(self, rule: str, tensors: Sequence[int], factors: Tensor) -> None:
        """Multiply gradients by factors, one for all or one for each; a factor of 1 changes nothing.

        On the host, the changed gradients are counted. On a device, counting would wait, so the caller counts.
        """
        if _torch.is_host(factors):
            numbers = factors.tolist()
            biting = [*tensors] if min(numbers) < 1.0 else []
            if biting and len(numbers) > 1:
                biting = [i for i, factor in zip(tensors, numbers, strict=True) if factor < 1.0]
            self._context.event_log.count_changed(rule, len(biting))
            if biting:
                shortening = [factor for factor in numbers if factor < 1.0]
                _numbers.scale_(_dist.parts(self.writable(biting)), shortening)
            return
        parts = _dist.parts(self.writable(tensors))
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
