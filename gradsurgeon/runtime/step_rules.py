"""The rules at `step`: what is recorded and edited of the gradients that an update is about to consume."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gradsurgeon.actions import CaptureRule, FreezeRule, ObserverRule, TrapRule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.gradient_edits import edit_gradients
from gradsurgeon.runtime.gradient_rules import observe
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.spike_traps import SpikeTraps
from gradsurgeon.runtime.step_counter import StepCounter


class StepRules:
    """Runs the rules at `step` in file order on the gradients that an update is about to consume."""

    def __init__(self, context: Context, spikes: SpikeTraps) -> None:
        self._context = context
        self._spikes = spikes
        # Gradients that were edited as final ones at the end of a pass, before an optimizer turned up
        # that is about to consume them, unless the script assigns others.
        self._spared: dict[int, weakref.ref[Tensor]] = {}

    def run(self, counter: StepCounter, gradients: Gradients, *, acting: bool) -> set[int]:
        """Act on the gradients of one counter; return those that an edit may have made non-finite."""
        context = self._context
        due_rules = context.due_rules(counter)
        spared = {i: self._spared.pop(i) for i in due_rules.edited.intersection(self._spared)}
        same = {i for i, grad in spared.items() if i in gradients and gradients[i] is grad()}
        edited = due_rules.edited - same if acting else frozenset()
        suspicious: set[int] = set()
        with torch.no_grad(), gradients.in_true_units(edited):
            for bound_rule in due_rules.at_step:
                rule = bound_rule.rule
                if isinstance(rule, ObserverRule | CaptureRule):
                    observe(context, bound_rule, gradients)
                    continue
                tensors = gradients.having(bound_rule.tensors)
                if rule.edits:
                    tensors = [tensor for tensor in tensors if tensor in edited]
                elif isinstance(rule, TrapRule):  # it has judged
                    continue
                if not tensors:
                    continue
                if isinstance(rule, FreezeRule):
                    context.event_log.count_changed(rule.id, len(tensors))
                elif isinstance(rule, TrapRule):
                    self._spikes.cut(bound_rule, gradients, tensors)
                else:
                    edit_gradients(context, bound_rule, gradients, tensors)
                context.event_log.count_fired(rule.id, counter.step, len(tensors))
                if rule.may_overflow and context.mode == "act":
                    suspicious.update(tensors)
        return suspicious

    def arrived(self, tensors: Iterable[int]) -> None:
        """Note that gradients have got something that no rule at the step has seen."""
        for tensor in self._spared.keys() & set(tensors) if self._spared else ():
            del self._spared[tensor]

    def spare(self, edited: Mapping[int, weakref.ref[Tensor]]) -> None:
        """Leave gradients alone in the next update that have been edited for it already."""
        self._spared.update(edited)
