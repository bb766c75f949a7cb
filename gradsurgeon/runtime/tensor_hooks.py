"""Hooks on activations: which gradient they wait for, and which of them never came."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon import _torch
from gradsurgeon.actions import Rule
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning import ROOT
from gradsurgeon.runtime.activation_rules import ActivationRules, Due, ModuleSchedule, NamedRule
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.step_counter import StepCounter


class TensorHooks:
    """Brings the rules of a session to activations, and the hooks for gradients with them."""

    def __init__(self, sites: ActivationRules) -> None:
        self.sites = sites
        self.context = sites.context
        self._tags: dict[str, ModuleSchedule] = {}
        # Each leaves with its tensor: a loop that only predicts never comes to an update.
        self._since_update: MutableMapping[Tensor, list[GradHook]] = WeakTensorKeyDictionary()

    def due(self, timetable: ModuleSchedule, *, training: bool) -> Due | None:
        if self.context.paused:
            return None
        self.context.refuse_graph_capture()
        return timetable.due(self.sites.counters.of(timetable.owner).step, training=training)

    def act(
        self,
        due: Due,
        tensor: Tensor,
        owner: str,
        # Whether the gradient of a view is meant, because others use the tensor too.
        needs_view: Callable[[Tensor], bool] = lambda _: False,
    ) -> Tensor:
        """Run rules on a tensor, and have them run on its gradient; return the tensor to go on with."""
        out = self.sites.on_value(due.values, tensor, owner)
        if due.grads and out.requires_grad and torch.is_grad_enabled():
            # Other tensors go with their graph. A leaf stays, and so would its hooks, which would act once
            # for each forward pass.
            if out.is_leaf or (out is tensor and needs_view(tensor)):
                out = out.view_as(out)
            self._hook(due.grads, out, owner)
        return out

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        if not self.context.program.tags:
            return tensor
        if name not in self._tags:
            rules = [rule for rule in self.context.program.tags if _matches(rule, name)]
            self._tags[name] = ModuleSchedule(rules, ROOT, name)
        due = self.due(self._tags[name], training=True)
        return tensor if due is None else self.act(due, tensor, ROOT)

    def _hook(self, rules: Sequence[NamedRule], tensor: Tensor, owner: str) -> None:
        if self.sites.is_unreadable(tensor, rules, owner):
            return
        acting = tuple(named for named in rules if not self.sites.has_edited(named.rule, tensor))
        if not acting:
            return
        for rule, _ in acting:
            self.sites.mark_edited(rule, tensor)
        with self.sites.lock:
            hook = GradHook(self.sites, acting, owner, tensor)
            self._since_update.setdefault(tensor, []).append(hook)

    def missed(self, counter: StepCounter) -> None:
        with self.sites.lock:
            for tensor, hooks in list(self._since_update.items()):
                for hook in list(hooks):
                    if self.sites.counters.of(hook.owner) is counter:
                        hooks.remove(hook)
                        self._tell_if_cut_off(hook, tensor)

    def _tell_if_cut_off(self, hook: GradHook, tensor: Tensor) -> None:
        if not hook.arrived and tensor._version != hook.version:  # noqa: SLF001 # counts writes
            text = (
                f"{hook.rules[0].name} was written in place by what follows it, so that no gradient "
                "arrived: let the next operation work out of place, or name another module"
            )
            self.sites.warn("in-place", text, hook.rules, hook.owner)


class GradHook:
    __torch_unserializable__ = True

    def __init__(
        self, sites: ActivationRules, rules: tuple[NamedRule, ...], owner: str, tensor: Tensor
    ) -> None:
        self._sites = weakref.ref(sites)
        self.rules = rules
        self.owner = owner
        self.__name__ = f"{'+'.join(rule.id for rule, _ in rules)}:{owner}"
        self.arrived = False
        self.version = tensor._version  # noqa: SLF001 # counts writes
        _torch.register_hook(tensor, self)

    @uncompiled
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        self.arrived = True
        sites = self._sites()
        if grad is None or sites is None or sites.context.paused:
            return None
        out = sites.on_gradient(self.rules, grad, self.owner)
        return None if out is grad else out


def _matches(rule: Rule, name: str) -> bool:
    excluded = any(compile_pattern(text).matches(name) for text in rule.exclude)
    return not excluded and any(pattern.matches(name) for pattern in rule.patterns)
