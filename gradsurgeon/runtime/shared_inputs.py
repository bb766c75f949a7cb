"""Tensors that several modules take: rules see each module's gradient before autograd sums them.

Such a tensor gets one view, and this view gets one view per module that takes the tensor. Hooks on the module
views see the contribution of each module. The hook on the common view runs after all of them, and may return another sum.
The views are ordinary views, so a module may write to its input. No event marks the last module, so the graphs of the
modules keep the views and hooks, which die with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import LossRule
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime.activation_rules import ActivationRules, Due, NamedRule
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.current_pass import is_taken, returns_gradients
from gradsurgeon.runtime.loss_rules import DueLossRule, LossEffects
from gradsurgeon.tensors.inner_products import Contributions, weighted_sum

_Hook = Callable[[Tensor | None], None]

_IN_PLACE = (
    "{owner} works in place on the tensor that it shares with others, so its gradient cannot be told from theirs; let it "
    "work out of place"
)
_SHARDED = (
    "{owner} takes a tensor that is divided over ranks (a DTensor), whose gradients cannot be compared during a backward "
    "pass: let the module before it return a plain tensor (`use_local_output=True`)"
)
_WRITTEN = (
    "{before} took a tensor that was written in place before {owner} took it, so their gradients do not meet: let the "
    "operation that writes work out of place"
)
_APART = (
    "{missing} took a tensor together with {there} and sends nothing back in this backward pass, which {why}: gradients "
    "of several passes cannot be combined. Call `.backward()` once, on the sum of the losses"
)
_KEPT = "keeps the graph for another pass (retain_graph=True)"
_LATER = "is not the first one through it"
_REENTRANT = (
    "{there} takes its tensor in a checkpoint with use_reentrant=True. This runs it in a backward pass of its own, so its "
    "gradient meets no other one; use use_reentrant=False"
)
_GRAPH = (
    "a backward pass with create_graph=True goes through the gradients of {there}, but weights have no gradient; pause "
    "the session around this pass"
)
_TRANSFORMED = (
    "left a tensor alone that is in a transform of torch.func, or has no numbers to read (torch.func.vmap, grad or jacrev, "
    "is_grads_batched; the meta device; torch.export at its trace): nothing was compared or combined there"
)


class SharedInputs:
    """Runs the rules of a session on the gradients that modules contribute to a tensor that they all take."""

    def __init__(self, sites: ActivationRules, effects: LossEffects) -> None:
        self._sites, self._effects = sites, effects
        self._rules = [rule for rule in sites.context.rules if isinstance(rule, LossRule)]
        # The modules of each rule, in the order of the model.
        self._members: dict[str, list[str]] = {}
        for module in sites.context.program.modules:
            for rule in module.on_shared:
                self._members.setdefault(rule.id, []).append(module.name)
        # The forks by tensor id, as long as a module can still send a gradient back.
        self._forks: weakref.WeakValueDictionary[int, _Fork] = weakref.WeakValueDictionary()

    def take(self, due: Due, tensor: Tensor, owner: str, *, in_place: bool) -> Tensor:
        """Return the tensor that a module receives instead of a tensor."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        rules = due.grads
        if _torch.is_unreadable(tensor) or _torch.in_transform():
            self._sites.warn("unreadable", _TRANSFORMED, rules, owner)
            return tensor
        if in_place:
            self._sites.warn("shared", _IN_PLACE.format(owner=printable(owner)), rules, owner)
            return tensor
        if _dist.is_sharded(tensor):
            for rule, _ in rules:
                self._refuse(rule.id, "shared", _SHARDED.format(owner=printable(owner)))
            return tensor
        with self._sites.lock:
            fork = self._forks.get(id(tensor))
            if fork is None or not fork.is_of(tensor):
                if fork is not None and fork.tensor is tensor:
                    before = _listed(fork.meeting.taken)
                    text = _WRITTEN.format(before=before, owner=printable(owner))
                    self._sites.warn("in-place", text, rules, owner)
                fork = self._forks[id(tensor)] = _Fork(self, tensor)
            return fork.branch(owner, rules)

    def arrived(self, meeting: _Meeting, total: Tensor) -> Tensor | None:
        """Compare or combine the gradients of modules; return the tensor that replaces their sum, if one does."""
        given, makes_graph = meeting.take(), torch.is_grad_enabled()
        if is_taken() or self._sites.context.paused or not given:
            return None
        with self._sites.lock, torch.no_grad():
            self._sites.passes.seen.module = True
            owner = self._owner(meeting.rules[0].rule.id)
            if self._sites.is_unreadable(total, meeting.rules, owner):
                return None
            self._check(meeting, given)
            due = [self._due(rule, meeting, given, total) for rule in self._rules]
            due = [one for one in due if len(one.senders) > 1]
            for one in due:
                if makes_graph and self._effects.acts(one.rule.id):
                    self._refuse(one.rule.id, "graph", _GRAPH.format(there=_listed(one.senders)))
            contributions = Contributions({id(total): given}, self._sites.context.scaling.scale)
            weights: dict[str, float] = {}
            for one in due:
                weights |= self._effects.run(one, contributions) or {}
            if all(weight == 1.0 for weight in weights.values()):
                return None
            # Summed anew from the contributions: in the total, rounding has lost small contributions.
            return weighted_sum(given, weights)

    def _due(
        self, rule: LossRule, meeting: _Meeting, given: Mapping[str, Tensor], total: Tensor
    ) -> DueLossRule:
        matched = meeting.matched.get(rule.id, ())
        there = [n for n in self._members.get(rule.id, ()) if n in matched and n in given]
        step = self._sites.counters.of(self._owner(rule.id)).step if there else 0
        return DueLossRule(self._effects, rule, step, there, {0: total})

    def _check(self, meeting: _Meeting, given: Mapping[str, Tensor]) -> None:
        """Refuse gradients that would have to meet gradients of another pass."""
        if returns_gradients():
            # A script calls `torch.autograd.grad` of one loss to inspect it.
            return
        meeting.passes += 1
        for rule, matched in meeting.matched.items():
            there = [name for name in given if name in matched]
            missing = [n for n in meeting.outstanding() if n in matched and n not in given]
            if there and missing and (_torch.keeps_graph() or meeting.passes > 1):
                why = _KEPT if _torch.keeps_graph() else _LATER
                text = _APART.format(missing=_listed(missing), there=_listed(there), why=why)
                self._refuse(rule, "apart", text)
            elif there and meeting.in_reentrant and len(matched) == 1:
                self._refuse(rule, "apart", _REENTRANT.format(there=_listed(there)))

    def _owner(self, rule: str) -> str:
        return self._members[rule][0]

    def _refuse(self, rule: str, topic: str, text: str) -> None:
        """Raise if a rule has to combine and cannot; warn if it only observes."""
        context, step = self._sites.context, self._sites.counters.of(self._owner(rule)).step
        if self._effects.acts(rule):
            raise GradSurgeonError(f"{context.place(step, rule)}: {text}")
        context.event_log.notice_once(topic, text, rule=rule, step=step, warn=True)


class _Fork:
    """A tensor that modules may still take. Only the graphs of the modules that took it keep this object."""

    def __init__(self, shared: SharedInputs, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.meeting = _Meeting(shared, self, is_leaf=tensor.is_leaf)
        self._version = _torch.writes(tensor)
        self._common: Tensor | None = tensor.view_as(tensor)
        # A view that referred to itself would never be freed.
        _torch.register_hook(self._common, self.meeting)

    def is_of(self, tensor: Tensor) -> bool:
        return self.tensor is tensor and _torch.writes(tensor) == self._version

    def branch(self, module: str, rules: Sequence[NamedRule]) -> Tensor:
        """Return a view for one module, with a hook that notes the gradient of this module."""
        assert self._common is not None  # noqa: S101 # `is_of` tells

        @uncompiled
        def give(grad: Tensor | None) -> None:
            # The hook keeps the fork alive, as long as a graph may still send something back.
            if grad is not None:
                self.meeting.give(module, grad)

        self.meeting.expect(module, rules, give)
        give.__name__ = f"{self.meeting.__name__}:{module}"
        cast("Any", give).__torch_unserializable__ = True
        view = self._common.view_as(self._common)
        _torch.register_hook(view, give)
        return view

    def close(self) -> None:
        """Release the tensor: its gradients have met."""
        self.tensor = self._common = None


class _Meeting:
    """Hook on a tensor that several modules take: when torch calls it, their gradients have come."""

    __torch_unserializable__ = True

    def __init__(self, shared: SharedInputs, fork: _Fork, *, is_leaf: bool) -> None:
        self._shared, self._fork = weakref.ref(shared), weakref.ref(fork)
        self.rules: list[NamedRule] = []
        # The modules that have taken the tensor, by rule.
        self.matched: dict[str, set[str]] = {}
        # The hooks that the calls of each module wait for, as long as their graphs live.
        self.taken: dict[str, list[weakref.ref[_Hook]]] = {}
        self.passes = 0
        # A checkpoint with use_reentrant=True runs forward again on a detached tensor.
        self.in_reentrant = _torch.graph_task() != -1 and is_leaf
        self._task = -1
        self._given: dict[str, Tensor] = {}

    @property
    def __name__(self) -> str:
        return f"{'+'.join(rule.id for rule, _ in self.rules)}:{'+'.join(self.taken)}"

    def expect(self, module: str, rules: Sequence[NamedRule], hook: _Hook) -> None:
        self.taken.setdefault(module, []).append(weakref.ref(hook))
        for named in rules:
            if named.rule.id not in self.matched:
                self.rules.append(named)
            self.matched.setdefault(named.rule.id, set()).add(module)

    def outstanding(self) -> list[str]:
        """Return the modules that can still send a gradient back, because something has kept their output."""
        return [name for name, hooks in self.taken.items() if any(hook() for hook in hooks)]

    def give(self, module: str, grad: Tensor) -> None:
        shared = self._shared()
        if shared is None or is_taken():
            return
        # A pass that failed, or did not come this far, leaves gradients that do not belong to the next pass.
        if (task := _torch.graph_task()) != self._task:
            self._task, self._given = task, {}
        with torch.no_grad():
            before = self._given.get(module)
            # A batch of gradients (is_grads_batched) cannot be detached, and need not be.
            one = grad.detach() if grad.requires_grad else grad
            # The sum is a new tensor, because autograd holds this one.
            self._given[module] = one if before is None else before + one

    def take(self) -> dict[str, Tensor]:
        given, self._given = self._given, {}
        return given if self._task == _torch.graph_task() else {}

    @uncompiled
    def __call__(self, total: Tensor | None) -> Tensor | None:
        shared = self._shared()
        if total is None or shared is None:
            return None
        fork = self._fork()
        if fork is not None and not (is_taken() or returns_gradients()):
            fork.close()
        return shared.arrived(self, total)


def _listed(names: Iterable[str]) -> str:
    return " and ".join(map(printable, names))
