"""The rules at `step`: final gradients, edited in place right before an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon.actions import ByNorm, Edit
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.agenda import Lane
from gradsurgeon.runtime.backward import check_layout
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.deciding import can_decide, changes_of_each, decide_each
from gradsurgeon.runtime.final import Finals
from gradsurgeon.runtime.look import keep
from gradsurgeon.runtime.shortening import LEFT_ALONE
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.targets import Mark, marks


class StepEdits:
    """Runs the rules at `step` in file order on the gradients that an update is about to consume."""

    def __init__(self, state: State) -> None:
        self._state = state
        # What the edits left behind in this step. Where a closure is called again and computes no new
        # gradients, those that are still the same have had their turn.
        self._left: dict[int, Mark] = {}
        # The same of the last run, to be put there if there is another one in this step.
        self._last: tuple[list[int], tuple[list[int], list[int]]] | None = None

    def run(self, clock: Clock) -> set[int]:
        """Act on the gradients of one clock.

        Returns:
            The tensors that an edit may have made non-finite.
        """
        state = self._state
        agenda = state.agenda(clock)
        if not agenda.at_step:
            return set()
        fresh = self._fresh(*state.targets.grads(agenda.stepped))
        finals = Finals(state, fresh, state.looks.get(clock))
        suspicious: set[int] = set()
        acting = state.mode == "act"
        with torch.no_grad():
            finals.unscale(agenda.edited)
            try:
                for lane in agenda.in_update:
                    if having := finals.having(lane.tensors):
                        self._one(lane, finals, having)
                        for rule in lane.parts:
                            if rule.role != "capture":  # counts by itself
                                state.journal.fired(rule.id, clock.step, len(having))
                            if rule.may_overflow and acting:
                                suspicious.update(having)
            finally:
                finals.rescale()
        if acting:
            finals.tell_look(suspicious)
            left = finals.having(agenda.edited)
            self._last = left, marks(finals.of(left))
        return suspicious

    def _fresh(self, tensors: list[int], grads: list[Tensor]) -> dict[int, Tensor]:
        """Return the gradients that have not had their turn in this step."""
        found = dict(zip(tensors, grads, strict=True))
        if self._last is not None:
            left, seen = self._last
            self._left.update(zip(left, zip(*seen, strict=True), strict=True))
            self._last = None
        if not self._left:
            return found
        now = zip(tensors, zip(*marks(grads), strict=True), strict=True)
        return {tensor: found[tensor] for tensor, mark in now if self._left.get(tensor) != mark}

    def spare(self, edited: dict[int, Mark]) -> None:
        """Leave gradients alone that have been edited as final ones already."""
        self._left.update(edited)

    def forget(self) -> None:
        """Forget what the edits left behind: the step is over.

        Marks must not outlive it. A new gradient is likely to get the address of the old one.
        """
        self._left.clear()
        self._last = None

    def _one(self, lane: Lane, finals: Finals, tensors: Sequence[int]) -> None:
        state, rule = self._state, lane.rule
        if rule.role == "observe":
            self._log(lane, finals, tensors)
        elif rule.role == "capture":
            keep(state, lane, {tensor: finals[tensor] for tensor in tensors}, None)
        elif rule.role == "freeze":
            state.journal.altered(rule.id, len(tensors))
        else:
            edit = state.edits[rule.id]
            for part in lane.parts:
                if not part.keeps_zero:
                    for tensor in tensors:
                        check_layout(part, finals[tensor], state.program.names[tensor])
            if edit.by_norm is not None:
                self._by_norm(lane, edit.by_norm, finals, tensors)
            else:
                self._elementwise(lane, edit, finals, tensors)

    def _elementwise(self, lane: Lane, edit: Edit, finals: Finals, tensors: Sequence[int]) -> None:
        journal = self._state.journal
        each = [self._state.edits[rule.id] for rule in lane.parts]
        parts = {tensor: _dist.local(finals[tensor]) for tensor in tensors}
        known = [t for t, part in parts.items() if all(can_decide(one, part) for one in each)]
        answers = decide_each(each, [parts[tensor] for tensor in known], finals.ranges(known))
        for rule, own in zip(lane.parts, answers, strict=True):
            journal.altered(rule.id, sum(own))
        biting = [tensor for tensor, *own in zip(known, *answers, strict=True) if any(own)]
        unknown = parts.keys() - set(known)
        blind = [tensor for tensor in tensors if tensor in unknown]
        for tensor in blind:
            for rule, flag in zip(lane.parts, changes_of_each(each, parts[tensor]), strict=True):
                journal.altered(rule.id, flag)
        # Whether a gradient has changed must be the same on all ranks that share it: one that measured
        # it again would wait for the others. So all write, be it for nothing.
        bitten = set(biting)
        for_all = [t for t in known if t not in bitten and _dist.is_sharded(finals[t])]
        written = biting + for_all + blind
        _apply(edit, [_dist.local(grad) for grad in finals.writable(written)])
        finals.wrote(edit, biting)

    def _by_norm(self, lane: Lane, edit: ByNorm, finals: Finals, tensors: Sequence[int]) -> None:
        journal, rule = self._state.journal, lane.rule
        norms = finals.norms(tensors, edit.order)
        if edit.over_rule:
            norms = torch.linalg.vector_norm(norms, edit.order, keepdim=True)
        spoilt = norms.isfinite().logical_not_().any()
        journal.later(spoilt, LEFT_ALONE, rule=rule.id, step=lane.clock.step)
        factors = edit.factor(norms)
        if not _torch.is_host(factors):
            journal.altered(rule.id, (factors.expand(len(tensors)) < 1.0).sum())
            self._shorten(finals.writable(tensors), factors)
            finals.shortened(tensors)
            return
        values = factors.tolist()
        if not min(values) < 1.0:
            return
        if len(values) < len(tensors):  # one for all
            values *= len(tensors)
        biting = [
            (tensor, factor) for tensor, factor in zip(tensors, values, strict=True) if factor < 1.0
        ]
        journal.altered(rule.id, len(biting))
        own = [tensor for tensor, _ in biting]
        self._shorten(finals.writable(own), [factor for _, factor in biting])
        finals.shortened(own)

    @staticmethod
    def _shorten(grads: Sequence[Tensor], factors: Tensor | Sequence[float]) -> None:
        """Multiply gradients by a factor each, or by one for all that is still on a device."""
        parts = [_dist.local(grad) for grad in grads]
        if not isinstance(factors, Tensor):
            same = len(set(factors)) == 1
            torch._foreach_mul_(parts, factors[0] if same else list(factors))
            return
        alike = {part.device for part in parts} == {factors.device}
        if len(factors) == 1 and alike and all(part.ndim for part in parts):
            torch._foreach_mul_(parts, factors[0])
            return
        for part, factor in zip(parts, factors.expand(len(parts)).unbind(), strict=True):
            on_device = factor.to(part.device)
            # In place, 0-dim tensors would take the wider dtype.
            part.copy_(part * on_device) if part.ndim == 0 else part.mul_(on_device)

    def _log(self, lane: Lane, finals: Finals, tensors: Sequence[int]) -> None:
        columns = lane.columns(tensors)
        for stat, key in lane.keys.items():
            if stat == "l2":
                values = finals.norms(tensors, 2.0)
            else:
                values = measure.statistics(stat, finals.of(tensors))
            self._state.recorder.add(key, lane.clock.step, columns, values, replace=True)


def _apply(edit: Edit, grads: list[Tensor]) -> None:
    dense = [grad for grad in grads if grad.layout == torch.strided]
    if dense:
        edit.apply_(dense)
    for grad in grads:
        if grad.layout != torch.strided:
            # In place for the outside: the optimizer and the script keep seeing the same tensor.
            grad.copy_(_numbers.on_values(edit.apply, grad))
