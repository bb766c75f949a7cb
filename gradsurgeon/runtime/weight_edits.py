"""The effects of rules that edit weights once an update is over, or what the update has changed in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.actions import Edit
from gradsurgeon.runtime.device_outcome import when_made
from gradsurgeon.runtime.effect import Bound, WeightUpdate
from gradsurgeon.runtime.element_edits import ElementEdit
from gradsurgeon.runtime.running_norms import wide
from gradsurgeon.runtime.spike_effect import SpikeEffect
from gradsurgeon.runtime.weight_effects import AfterUpdate
from gradsurgeon.tensors import _dist, _torch, measure

# Elements of weights that are edited together.
_MANY = 2**17
# The index of a weight, what this rank holds of it, and a copy from before the update if a rule is on updates.
_Weight = tuple[int, Tensor, Tensor | None]


class WeightEdit(AfterUpdate, ElementEdit):
    """Edits each element of a weight, or of its change."""

    @torch.no_grad()
    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        step = bound.counter.step
        updated = [each for each in self.updated(update, bound) if each[0] not in update.hidden_by]
        compiled: Edit = self.compiled_at(step)
        are_sharded = _dist.any_sharded([param for _, param, _ in updated])
        one_by_one = compiled.apply_ is None or (compiled.takes_at and are_sharded)
        # Only the device knows whether a fused update took place.
        one_by_one = one_by_one or not self.context.acts or update.outcome is not None
        together = []
        for index, param, before in updated:
            part = _dist.local(param)
            if one_by_one or index in update.trains:
                self._edit(update, index, part, before, step)
            else:
                together.append((index, part, before))
        for chunk in _in_chunks(together):
            self._edit_together(chunk, step)
        if updated:
            when_made(update.outcome, self.count_fired, step, len(updated))

    def _edit_together(self, weights: Sequence[_Weight], step: int) -> None:
        parts = [part for _, part, _ in weights]
        olds = [before for _, _, before in weights if before is not None]
        edited = parts
        if olds:
            # torch has no public functions on several tensors.
            edited = list(torch._foreach_sub(parts, olds))  # noqa: SLF001
        self.edit_in_place([index for index, _, _ in weights], edited, step)
        if olds:
            torch._foreach_add_(edited, olds)
            torch._foreach_copy_(parts, edited)

    def _edit(
        self, update: WeightUpdate, index: int, part: Tensor, before: Tensor | None, step: int
    ) -> None:
        """Edit a weight, or with ``before`` what the update has changed in it."""
        old = part
        if before is not None:
            old = part - before
        apply = self._apply_at(self.context.names[index], index, step, old)
        if not self.context.acts:
            self._count_changed(old, apply)
            return
        new = apply(old)
        if before is not None:
            new = before + new
        if update.outcome is not None:
            new = torch.where(update.outcome.left_out.to(part.device) > 0, part, new)
        if index in update.trains:
            new = torch.where(update.trains[index], new, part)
        part.copy_(new)


class UpdateSpikes(AfterUpdate, SpikeEffect):
    """Shortens or reports updates that are longer than a bound."""

    # The weights have moved already.
    judges = False
    noun = "weight change"

    @torch.no_grad()
    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        indices = []
        wholes = []
        moves = []
        for index, param, before in self.updated(update, bound):
            if before is not None and index not in update.hidden_by:
                part = _dist.local(param.detach())
                change = part - before
                indices.append(index)
                wholes.append(_dist.like(change, param) if _dist.is_sharded(param) else change)
                moves.append((part, before, change))
        if not indices:
            return
        step = bound.counter.step
        norms = measure.together(measure.norms(indices, wholes), indices)
        judged = self._compare(bound.indices, indices, wide(norms))
        outcome = update.outcome
        judged.learn(None if outcome is None else outcome.left_out)
        factors = judged.factors(indices)
        if self.edits and self.context.acts:
            each: Any = factors.expand(len(indices))
            if _torch.is_host(factors):
                each = each.tolist()
            for move, factor in zip(moves, each, strict=True):
                _shorten(*move, factor)
        count = len(indices) if self.edits else 1
        when_made(outcome, self.count_fired, step, count)
        when_made(outcome, self._tell, judged, indices, step, False)


def _shorten(part: Tensor, before: Tensor, change: Tensor, factor: float | Tensor) -> None:
    # On a device nobody waits for the factor.
    if isinstance(factor, Tensor):
        here = factor.to(part.device)
        part.copy_(torch.where(here < 1.0, before + change * here, part))
    elif factor < 1.0:
        torch.add(before, change.mul_(factor), out=part)


def _in_chunks(weights: Iterable[_Weight]) -> Iterator[Sequence[_Weight]]:
    """Yield weights in chunks that fit into the cache of a CPU, or of one large weight."""
    chunk: list[_Weight] = []
    free = _MANY
    for weight in weights:
        chunk.append(weight)
        free -= weight[1].numel()
        if free <= 0:
            yield chunk
            chunk = []
            free = _MANY
    if chunk:
        yield chunk
