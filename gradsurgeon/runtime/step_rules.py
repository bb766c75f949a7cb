"""The rules at `step`: they record and edit the gradients that an update is about to consume."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradsurgeon.actions import CaptureRule, FreezeRule, ObserverRule, TrapRule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.gradient_edits import edit_gradients
from gradsurgeon.runtime.gradient_rules import observe
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.spike_traps import SpikeTraps
from gradsurgeon.runtime.step_context import StepContext


class StepRules:
    """Runs the rules at `step` in file order on the gradients that an update is about to consume."""

    def __init__(self, context: Context, spikes: SpikeTraps) -> None:
        self._context = context
        self._spikes = spikes
        # Final gradients that rules edited at the end of a pass, before an optimizer turned up. The optimizer
        # is about to consume them, unless the script assigns others.
        self._spared: dict[int, weakref.ref[Tensor]] = {}

    def run(self, update: StepContext, *, acting: bool) -> set[int]:
        """Act on the gradients of an update; return the tensors that an edit may have made non-finite."""
        context, due, gradients = self._context, update.due, update.gradients
        if not due.at_step:
            return set()
        edited = due.edited if acting else frozenset[int]()
        if edited and self._spared:
            edited -= self._same(edited, gradients)
        suspicious: set[int] = set()
        with torch.no_grad(), gradients.in_true_units(edited):
            for bound_rule in due.at_step:
                if isinstance(bound_rule.rule, ObserverRule | CaptureRule):
                    observe(context, bound_rule, gradients)
                    continue
                tensors = gradients.having(bound_rule.tensors)
                if bound_rule.edits:
                    tensors = [tensor for tensor in tensors if tensor in edited]
                elif isinstance(bound_rule.rule, TrapRule):  # the trap has judged already
                    continue
                if tensors:
                    self._act(bound_rule, gradients, tensors, due.frozen)
                    if bound_rule.may_overflow and context.mode == "act":
                        suspicious.update(tensors)
        return suspicious

    def _act(
        self,
        bound_rule: BoundRule,
        gradients: Gradients,
        tensors: Sequence[int],
        frozen: Collection[int],
    ) -> None:
        rule, event_log = bound_rule.rule, self._context.event_log
        if isinstance(rule, FreezeRule):
            event_log.count_changed(rule.id, len(tensors))
        elif isinstance(rule, TrapRule):
            self._spikes.cut(bound_rule, gradients, tensors)
        else:
            edit_gradients(self._context, bound_rule, gradients, tensors, frozen)
        event_log.count_fired(rule.id, bound_rule.counter.step, len(tensors))

    def _same(self, edited: Iterable[int], gradients: Gradients) -> set[int]:
        """Return the tensors whose gradients were already edited for this update."""
        spared = {i: self._spared.pop(i) for i in edited if i in self._spared}
        return {i for i, grad in spared.items() if i in gradients and gradients[i] is grad()}

    def arrived(self, tensors: Iterable[int]) -> None:
        """Note tensors whose gradients have new content that no rule at `step` has seen."""
        for tensor in self._spared.keys() & set(tensors) if self._spared else ():
            del self._spared[tensor]

    def spare(self, edited: Mapping[int, weakref.ref[Tensor]]) -> None:
        """Skip edits of gradients in the next update that were already edited for it."""
        self._spared.update(edited)
