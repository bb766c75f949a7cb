"""Hooks on activations: they wait for gradients, and the session reports gradients that never came."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from gradsurgeon import _torch
from gradsurgeon.actions import Rule
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning import ROOT
from gradsurgeon.runtime.activation_rules import ActivationRules, Due, ModuleSchedule, NamedRule
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.shared_inputs import SharedInputs

# A loop without updates only drops its tensors, and their entries must not pile up.
_MOST = 1024


class TensorHooks:
    """Runs the rules of a session on activations, and hooks activations for rules on their gradients."""

    def __init__(self, sites: ActivationRules, shared: SharedInputs | None = None) -> None:
        self.sites, self.shared = sites, shared
        self.context = sites.context
        self._tags: dict[str, ModuleSchedule] = {}
        self._since_update: list[ExpectedGradient] = []
        self._most = _MOST

    def schedule(self, rules: Sequence[Rule], owner: str, name: str) -> ModuleSchedule:
        return ModuleSchedule(rules, owner, name, self.sites.counters)

    def may_act(self) -> bool:
        if self.context.paused:
            return False
        self.context.refuse_graph_capture()
        return True

    def act(
        self,
        due: Due,
        tensor: Tensor,
        owner: str,
        step: int,
        # Tells whether the gradient of a view is meant, because other code uses the tensor also.
        needs_view: Callable[[Tensor], bool] = lambda _: False,
    ) -> Tensor:
        """Run rules on a tensor, and hook it for rules on its gradient; return the tensor to go on with."""
        out = self.sites.on_value(due.values, tensor, owner, step) if due.values else tensor
        if due.grads and out.requires_grad and torch.is_grad_enabled():
            # Non-leaf tensors die with their graph. A leaf stays, and its hooks would act once
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
            self._tags[name] = self.schedule(rules, ROOT, name)
        if not self.may_act():
            return tensor
        due, step = self._tags[name].now(training=True)
        return tensor if due is None else self.act(due, tensor, ROOT, step)

    def _hook(self, rules: Sequence[NamedRule], tensor: Tensor, owner: str) -> None:
        if self.sites.is_unreadable(tensor, rules, owner):
            return
        acting = tuple([named for named in rules if not self.sites.has_edited(named.rule, tensor)])
        if not acting:
            return
        for rule, _ in acting:
            self.sites.mark_edited(rule, tensor)
        expected = ExpectedGradient(acting, owner, tensor)
        with self.sites.lock:
            if len(self._since_update) >= self._most:
                self._since_update = [one for one in self._since_update if one.tensor() is not None]
                # A model may have more modules than `_MOST`.
                self._most = max(_MOST, 2 * len(self._since_update))
            self._since_update.append(expected)
        _torch.register_hook(tensor, GradHook(self.sites, expected))

    def missed(self, counter: StepCounter) -> None:
        with self.sites.lock:
            expected, self._since_update = self._since_update, []
            for one in expected:
                if self.sites.counters.of(one.owner) is counter:
                    self._tell_if_cut_off(one)
                else:
                    self._since_update.append(one)

    def _tell_if_cut_off(self, expected: ExpectedGradient) -> None:
        if expected.is_cut_off:
            text = (
                f"{expected.rules[0].name} was written in place by the operation after it, so no gradient "
                "arrived: let the next operation work out of place, or name another module"
            )
            self.sites.warn("in-place", text, expected.rules, expected.owner)


class ExpectedGradient:
    """A gradient that rules wait for. It keeps neither its tensor nor the hook on the tensor alive."""

    __slots__ = ("arrived", "owner", "rules", "tensor", "version")

    def __init__(self, rules: tuple[NamedRule, ...], owner: str, tensor: Tensor) -> None:
        self.rules = rules
        self.owner = owner
        self.tensor = TensorWeakRef(tensor)
        self.version = tensor._version  # noqa: SLF001 # counts writes
        self.arrived = False

    @property
    def is_cut_off(self) -> bool:
        """Whether an in-place write has come between the tensor and its gradient."""
        if self.arrived or (tensor := self.tensor()) is None:
            return False
        return bool(tensor._version != self.version)  # noqa: SLF001 # counts writes


class GradHook:
    __slots__ = ("_expected", "_sites")
    __torch_unserializable__ = True

    def __init__(self, sites: ActivationRules, expected: ExpectedGradient) -> None:
        self._sites = weakref.ref(sites)
        self._expected = expected

    @property
    def __name__(self) -> str:
        ids = "+".join(rule.id for rule, _ in self._expected.rules)
        return f"{ids}:{self._expected.owner}"

    @uncompiled
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        expected = self._expected
        expected.arrived = True
        sites = self._sites()
        if grad is None or sites is None or sites.context.paused:
            return None
        out = sites.on_gradient(expected.rules, grad, expected.owner)
        return None if out is grad else out


def _matches(rule: Rule, name: str) -> bool:
    excluded = any(compile_pattern(text).matches(name) for text in rule.exclude)
    return not excluded and any(pattern.matches(name) for pattern in rule.patterns)
