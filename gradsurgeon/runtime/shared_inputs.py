"""Tensors that several modules take: rules see each module's gradient before autograd sums them.

Such a tensor gets one view, and this view gets one view per module. The hook on the common view runs after those on the
module views, and may return another sum. The graphs of the modules keep the views and hooks, which die with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime.activation_rules import ActivationRules, NamedEffect, warn
from gradsurgeon.runtime.effect import Effect
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.loss_effects import DueLossRule, LossEffect
from gradsurgeon.runtime.refusals import Hook
from gradsurgeon.runtime.running_passes import is_taken
from gradsurgeon.tensors import _dist, _torch
from gradsurgeon.tensors._backward_calls import is_only_grad
from gradsurgeon.tensors._torch import uncompiled
from gradsurgeon.tensors.inner_products import Contributions, weighted_sum

_Hook = Callable[[Tensor | None], None]

_IN_PLACE = (
    "{owner} works in place on the tensor that it shares with others: let it work out of place"
)
_SHARDED = "{owner} takes a tensor that is divided over ranks: let the module before it return a plain one (`use_local_output=True`)"
_WRITTEN = "{before} took a tensor that was written in place before {owner} took it: let the operation that writes work out of place"
_APART = (
    "{missing} took a tensor together with {there} and sends nothing back in this pass, which keeps its graph or is not the "
    "first one through it: call `.backward()` once, on the sum of the losses"
)
_REENTRANT = "{there} takes its tensor in a checkpoint with use_reentrant=True, a backward pass of its own: use use_reentrant=False"
_GRAPH = "a pass with create_graph=True goes through the gradients of {there}: pause the session around it"


class SharedInputs:
    """Runs the rules of a session on the gradients that modules contribute to a tensor that they all take."""

    def __init__(self, activations: ActivationRules, effects: Effects) -> None:
        self._activations = activations
        self.context = activations.context
        # The modules of each effect, in the order of the model. The first one counts the steps.
        self._members: dict[Effect, list[str]] = {}
        for effect in effects.all:
            names = [name for name, on_module in effects.modules.items() if effect in on_module]
            if names and isinstance(effect, LossEffect):
                self._members[effect] = names
        # The forks by tensor id, as long as a module can still send a gradient back.
        self._forks: weakref.WeakValueDictionary[int, _Fork] = weakref.WeakValueDictionary()

    def branch(
        self, effects: Sequence[NamedEffect], tensor: Tensor, owner: str, *, in_place: bool
    ) -> Tensor:
        """Return the tensor that a module receives instead of a tensor."""
        activations = self._activations
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        if activations.is_unreadable(tensor, effects):
            return tensor
        if in_place:
            text = _IN_PLACE.format(owner=printable(owner))
            warn(effects, "shared", text)
            return tensor
        if _dist.is_sharded(tensor):
            for effect, _ in effects:
                self._refuse(effect, "shared", _SHARDED.format(owner=printable(owner)))
            return tensor
        with activations.lock:
            fork = self._forks.get(id(tensor))
            if fork is None or not fork.is_of(tensor):
                if fork is not None and fork.tensor is tensor:
                    before = _listed(fork.meeting.taken)
                    text = _WRITTEN.format(before=before, owner=printable(owner))
                    warn(effects, "in-place", text)
                fork = _Fork(self, tensor)
                self._forks[id(tensor)] = fork
            return fork.branch(owner, effects)

    def arrived(self, meeting: _Meeting, total: Tensor) -> Tensor | None:
        """Compare or combine the gradients of modules; return the tensor that replaces their sum, if one does."""
        given = meeting.pop_grads()
        makes_graph = torch.is_grad_enabled()
        if is_taken() or self.context.paused or not given:
            return None
        activations = self._activations
        with activations.lock, torch.no_grad():
            activations.passes.seen.module = True
            if activations.is_unreadable(total, meeting.effects):
                return None
            self._check(meeting, given)
            contributions = Contributions({id(total): given}, self.context.scaling.scale)
            weights: dict[str, float] = {}
            for effect, members in self._members.items():
                assert isinstance(effect, LossEffect)  # noqa: S101 # as above
                matched = meeting.matched.get(effect, ())
                there = [name for name in members if name in given and name in matched]
                if len(there) < 2:  # noqa: PLR2004 # one alone meets no other
                    continue
                if makes_graph and effect.combines:
                    self._refuse(effect, "graph", _GRAPH.format(there=_listed(there)))
                due = DueLossRule(effect, self._step(effect), there, {0: total})
                weights |= effect.run(due, contributions)
            if all(weight == 1.0 for weight in weights.values()):
                return None
            # Summed anew from the contributions: in the total, rounding has lost small contributions.
            return weighted_sum(given, weights)

    def _check(self, meeting: _Meeting, given: Mapping[str, Tensor]) -> None:
        """Refuse gradients that would have to meet gradients of another pass."""
        if is_only_grad():
            # A script calls `torch.autograd.grad` of one loss to inspect it.
            return
        meeting.passes += 1
        missing = [name for name in meeting.waiting() if name not in given]
        for effect, _ in meeting.effects:
            matched = meeting.matched[effect]
            there = [name for name in given if name in matched]
            if not there:
                continue
            lacking = [name for name in missing if name in matched]
            if lacking and (_torch.keeps_graph() or meeting.passes > 1):
                text = _APART.format(missing=_listed(lacking), there=_listed(there))
                self._refuse(effect, "apart", text)
            elif meeting.in_reentrant and len(matched) == 1:
                self._refuse(effect, "apart", _REENTRANT.format(there=_listed(there)))

    def _step(self, effect: Effect) -> int:
        return self.context.counters.of_module(self._members[effect][0]).step

    def _refuse(self, effect: Effect, topic: str, text: str) -> None:
        """Raise if a rule has to combine and cannot; warn if it only observes."""
        if effect.combines:
            place = self.context.place(self._step(effect), effect.rule.id)
            raise GradSurgeonError(f"{place}: {text}")
        effect.notice_once(topic, text, warn=True)


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

    def branch(self, module: str, effects: Sequence[NamedEffect]) -> Tensor:
        """Return a view for one module, with a hook that notes the gradient of this module."""
        assert self._common is not None  # noqa: S101 # `is_of` tells

        @uncompiled
        def give(grad: Tensor | None) -> None:
            # The hook keeps the fork alive, as long as a graph may still send something back.
            if grad is not None:
                self.meeting.give(module, grad)

        self.meeting.expect(module, effects, give)
        cast("Any", give).__torch_unserializable__ = True
        view = self._common.view_as(self._common)
        _torch.register_hook(view, give)
        return view

    def close(self) -> None:
        """Release the tensor: its gradients have met."""
        self.tensor = None
        self._common = None


class _Meeting(Hook):
    """Hook on a tensor that several modules take: when torch calls it, their gradients have come."""

    def __init__(self, shared: SharedInputs, fork: _Fork, *, is_leaf: bool) -> None:
        super().__init__(shared)
        self._fork = weakref.ref(fork)
        self.effects: list[NamedEffect] = []
        # The modules that have taken the tensor, by effect.
        self.matched: dict[Effect, set[str]] = {}
        # The hooks that the calls of each module wait for, as long as their graphs live.
        self.taken: dict[str, list[weakref.ref[_Hook]]] = {}
        self.passes = 0
        # A checkpoint with use_reentrant=True runs forward again on a detached tensor.
        self.in_reentrant = _torch.graph_task() != -1 and is_leaf
        self._task = -1
        self._given: dict[str, Tensor] = {}

    def expect(self, module: str, effects: Sequence[NamedEffect], hook: _Hook) -> None:
        self.taken.setdefault(module, []).append(weakref.ref(hook))
        for named in effects:
            if named.effect not in self.matched:
                self.effects.append(named)
            self.matched.setdefault(named.effect, set()).add(module)

    def waiting(self) -> list[str]:
        """Return the modules that can still send a gradient back."""
        waiting = []
        for module, hooks in self.taken.items():
            if any(hook() for hook in hooks):
                waiting.append(module)
        return waiting

    def give(self, module: str, grad: Tensor) -> None:
        shared = self._target()
        if shared is not None and not is_taken():
            with shared.context.refusals:
                self._add(module, grad)

    def _add(self, module: str, grad: Tensor) -> None:
        task = _torch.graph_task()
        if task != self._task:
            # A pass that failed, or did not come this far, leaves gradients that do not belong to the next pass.
            self._task = task
            self._given = {}
        with torch.no_grad():
            # A batch of gradients (is_grads_batched) cannot be detached, and need not be.
            if grad.requires_grad:
                grad = grad.detach()
            if module in self._given:
                # The sum is a new tensor, because autograd holds this one.
                grad = self._given[module] + grad
            self._given[module] = grad

    def pop_grads(self) -> dict[str, Tensor]:
        given = self._given
        self._given = {}
        if self._task != _torch.graph_task():
            return {}
        return given

    def run(self, shared: SharedInputs, total: Tensor | None) -> Tensor | None:
        if total is None:
            return None
        fork = self._fork()
        if fork is not None and not (is_taken() or is_only_grad()):
            fork.close()
        return shared.arrived(self, total)


def _listed(names: Iterable[str]) -> str:
    return " and ".join(map(printable, names))
