"""The effects of rules that keep something of tensors and change nothing: copies, records, and flags of traps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon.actions import CaptureRule, ObserverRule
from gradsurgeon.errors import shorten_names
from gradsurgeon.records.shared_rows import by_column
from gradsurgeon.runtime.context import Flag
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.effect import Effect, Origin
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.tensors import _dist, _numbers, _torch, measure
from gradsurgeon.tensors._torch import uncompiled

_AWAITING = (
    "has no records of {names}: these gradients await a sum over ranks, which takes a collective, and rules that only look "
    "wait for no rank. A rule at `step` that edits them makes the ranks agree first"
)
_SHARDED = "did not measure a tensor that is sharded over ranks: log another module, or set `use_local_output=True`"


class Copy(Effect):
    """Keeps copies."""

    rule: CaptureRule
    takes_any = True

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        if not origin.is_again:
            self._keep(origin.name, origin.step, unscaled(tensor, origin.scale))
        return tensor

    def act(self, gradients: Gradients, bound: BoundRule) -> None:
        indices = gradients.having(bound.indices)
        for index, true in zip(indices, gradients.unscaled(indices), strict=True):
            self._keep(self.context.program.names[index], bound.counter.step, true)

    def _keep(self, name: str, step: int, tensor: Tensor) -> None:
        # `keep` counts the firing.
        self.context.captures.keep(self.rule, name, step, tensor)


class Record(Effect):
    """Records statistics, in true units."""

    rule: ObserverRule

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        if origin.is_again:
            return tensor
        if origin.logged is not None:
            true = unscaled(tensor, origin.scale)
            origin.logged[self.rule.id][origin.index] = _kept(self.rule.stats, true)
        elif _dist.is_sharded(tensor):
            step = origin.counter().step
            self.log.notice_once("sharded", _SHARDED, rule=self.rule.id, step=step, warn=True)
            return tensor
        else:
            true = unscaled(tensor, origin.scale).detach()
            self.context.recorder.observe(self.rule, origin.name, origin.step, true)
        self.log.count_fired(self.rule.id, origin.step)
        return tensor

    def act(self, gradients: Gradients, bound: BoundRule) -> None:
        step = bound.counter.step
        indices = gradients.having(bound.indices)
        are_shared = _dist.any_sharded(gradients.of(indices))
        if are_shared:
            indices = self._recordable(gradients, indices, step)
        if not indices:
            return
        columns = bound.columns(indices)
        for stat, keys in bound.keys.items():
            grads: Sequence[Tensor] = ()
            if are_shared:
                grads, values = gradients.parts(stat, indices)
            else:
                values = gradients.statistics(stat, indices)
            for key, numbers in by_column(keys, values, are_parts=are_shared):
                self.context.recorder.add(key, step, columns, numbers, replace=True, grads=grads)
        self.log.count_fired(self.rule.id, step, len(indices))

    def _recordable(self, gradients: Gradients, indices: Sequence[int], step: int) -> Sequence[int]:
        """Return the gradients that can be recorded without a collective that other ranks may not call."""
        awaiting = [index for index in indices if _dist.is_partial(gradients[index])]
        if not awaiting or self.context.recorder.shared.together:
            return indices
        names = shorten_names([self.context.program.names[index] for index in awaiting])
        text = _AWAITING.format(names=names)
        self.log.notice_once("awaiting", text, rule=self.rule.id, step=step)
        return [index for index in indices if index not in awaiting]


def _kept(stats: Sequence[str], grad: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return a copy of a small gradient, to be measured together with others after the pass, else its statistics."""
    with torch.no_grad():
        if _numbers.is_small(grad):
            return grad.detach().clone()
        return measure.numbers(stats, grad)


class FlagNonfinite(Effect):
    """Keeps the number of non-finite elements of each tensor for the trap that judges the next update."""

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        if not origin.is_again:
            self._flag(tensor, origin, is_fed=origin.is_gradient)
            self.log.count_fired(self.rule.id, origin.step)
        elif not origin.is_gradient and not self.context.flags.is_known(self.rule.id, origin.name):
            self._flag(tensor, origin, is_fed=True)
        return tensor

    def _flag(self, tensor: Tensor, origin: Origin, *, is_fed: bool) -> None:
        true = unscaled(tensor, origin.scale)
        bad = _numbers.nonfinite(_dist.local(true))
        flag = Flag(self.rule, origin.name, origin.counter, bad, fed=is_fed)
        if not flag.fed and torch.is_grad_enabled():
            # A leaf gets no hook: the hooks of all passes would pile up on it.
            if tensor.requires_grad and not tensor.is_leaf:
                feeds = FeedsHook(flag)
                flag.graph = weakref.ref(feeds)
                _torch.register_hook(tensor, feeds)
            else:
                flag.waits = True
        self.context.flags.add(flag, again=origin.is_again)


class FeedsHook:
    """Tensor hook that marks a trap's flag once the flagged value takes part in a backward pass."""

    __torch_unserializable__ = True

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    @uncompiled
    def __call__(self, _grad: Tensor | None) -> None:
        self._flag.fed = True
