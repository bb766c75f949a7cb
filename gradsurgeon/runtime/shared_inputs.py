"""Tensors that several modules take, and the gradients that these send back to them, before they are summed.

Of such a tensor one view is made, and of this view one for each module that takes it: hooks on the latter see what
each module sends back, and one on the former comes after them all and may give another sum in the place of theirs. These
are views as a script makes them, so that a module may write to what it takes. Nobody knows when the last
module has come; so what the graph of one of them still needs is kept by this graph, and goes with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import Combination, LossRule
from gradsurgeon.compiler import Program
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime import running_passes
from gradsurgeon.runtime.activation_rules import ActivationRules, Due, NamedRule
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.loss_gradients import is_taken
from gradsurgeon.runtime.loss_rules import LossRules
from gradsurgeon.tensors.inner_products import InnerProducts, inner_products, pairs, weighted_sum

_IN_PLACE = (
    "{owner} works in place on the tensor that it shares with others: what it sends back cannot be told from theirs; "
    "let it work out of place"
)
_SHARDED = (
    "{owner} takes a tensor that is divided over ranks (a DTensor), whose gradients cannot be compared in the middle of "
    "a backward pass: let the module before it return a plain one (`use_local_output=True`)"
)
_WRITTEN = (
    "{before} took a tensor that was written in place before {owner} took it, so that what they send back does not "
    "meet: let the operation that writes work out of place"
)
_APART = (
    "{missing} took a tensor together with {there} and sends nothing back in this backward pass, which {why}: "
    "what comes in several passes cannot be brought together. Call `.backward()` once, on the sum of the losses"
)
_KEPT = "keeps the graph for another one (retain_graph=True)"
_LATER = "is not the first one through it"
_REENTRANT = (
    "{there} takes its tensor in a checkpoint with use_reentrant=True, which runs it in a backward pass of its own, so "
    "that its gradient meets no other one; use use_reentrant=False"
)
_GRAPH = (
    "a backward pass with create_graph=True goes through what {there} send back, and weights have no gradient of their "
    "own; pause the session around it"
)
_TRANSFORMED = (
    "left a tensor alone that is in a transform of torch.func, or has no numbers to read (torch.func.vmap, grad or jacrev, "
    "is_grads_batched; the meta device; torch.export at its trace): nothing was compared or combined there"
)


class SharedInputs:
    """Runs the rules of a session on what modules send back to a tensor that they all take."""

    def __init__(self, sites: ActivationRules, losses: LossRules) -> None:
        self._sites, self._losses = sites, losses
        self._rules = {rule.id: rule for rule in sites.context.rules if isinstance(rule, LossRule)}
        self._members = _members(sites.context.program)
        # As long as a module can still send something back to a tensor, by its id.
        self._forks: weakref.WeakValueDictionary[int, _Fork] = weakref.WeakValueDictionary()

    def take(self, due: Due, tensor: Tensor, owner: str, *, in_place: bool) -> Tensor:
        """Return what a module is to take in the place of a tensor."""
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
            self._refuse([rule.id for rule, _ in rules], "shared", _SHARDED, owner=printable(owner))
            return tensor
        with self._sites.lock:
            fork = self._forks.get(id(tensor))
            if fork is None or not fork.is_of(tensor):
                if fork is not None and fork.tensor is tensor:
                    text = _WRITTEN.format(before=_listed(fork.taken), owner=printable(owner))
                    self._sites.warn("in-place", text, rules, owner)
                meeting = _Meeting(self, is_leaf=tensor.is_leaf)
                fork = self._forks[id(tensor)] = _Fork(tensor, meeting)
            return fork.branch(owner, rules)

    def arrived(self, meeting: _Meeting, total: Tensor) -> Tensor | None:
        """Compare or combine what modules have sent back; return what takes the place of their sum."""
        given, grad_mode = meeting.take(), torch.is_grad_enabled()
        if is_taken() or self._sites.context.paused or not given:
            return None
        with self._sites.lock, torch.no_grad():
            self._sites.passes.seen.module = True
            if _torch.is_unreadable(total):
                owner = self._owner(meeting.rules[0].rule.id)
                self._sites.warn("unreadable", _TRANSFORMED, meeting.rules, owner)
                return None
            self._check(meeting, given)
            parties = list(self._parties(meeting, given))
            for rule, names in parties:
                if grad_mode and self._acts(rule.id):
                    self._refuse([rule.id], "graph", _GRAPH, there=_listed(names))
            return self._run(parties, given) if parties else None

    def _parties(self, meeting: _Meeting, given: Mapping[str, Tensor]) -> Iterator[_Party]:
        for rule_id, rule in self._rules.items():
            matched = meeting.matched.get(rule_id, ())
            order = self._members.get(rule_id, ())
            names = [name for name in order if name in matched and name in given]
            if len(names) > 1:
                yield _Party(rule, names)

    def _run(self, parties: Sequence[_Party], given: Mapping[str, Tensor]) -> Tensor | None:
        context, effects = self._sites.context, self._losses.effects
        names = [name for name in given if any(name in party.names for party in parties)]
        grads = [given[name] for name in names]
        compare = any(not isinstance(effects[party.rule.id], Combination) for party in parties)
        known = inner_products([[grad] for grad in grads], grads[:1], compare=compare)
        if (scale := context.scaling.scale) is not None:
            known = known.unscaled(scale)
        weights: dict[str, float] = {}
        for rule, mine in parties:
            part = _part(known, [names.index(name) for name in mine])
            step = self._sites.counters.of(self._owner(rule.id)).step
            if not isinstance(effects[rule.id], Combination):
                self._losses.record_pairs(rule, step, dict(pairs(mine, part)))
                continue
            found = self._losses.weights(rule, step, mine, part)
            if found is not None and context.mode == "act":
                weights |= dict(zip(mine, found, strict=True))
        if all(weight == 1.0 for weight in weights.values()):
            return None
        # From the contributions alone: what the largest of them has rounded away in the sum is gone.
        return weighted_sum(given, weights)

    def _check(self, meeting: _Meeting, given: Mapping[str, Tensor]) -> None:
        """Refuse gradients that would have to meet others which come in another pass."""
        if running_passes.returns_gradients():
            # `torch.autograd.grad` of one loss, as a script takes it to look at it.
            return
        meeting.passes += 1
        for rule_id, matched in meeting.matched.items():
            there = [name for name in given if name in matched]
            missing = [n for n in meeting.outstanding() if n in matched and n not in given]
            if there and missing and (_torch.keeps_graph() or meeting.passes > 1):
                why = _KEPT if _torch.keeps_graph() else _LATER
                named = {"missing": _listed(missing), "there": _listed(there), "why": why}
                self._refuse([rule_id], "apart", _APART, **named)
            elif there and meeting.in_reentrant and len(matched) == 1:
                self._refuse([rule_id], "apart", _REENTRANT, there=_listed(there))

    def _owner(self, rule: str) -> str:
        return self._members[rule][0]

    def _acts(self, rule: str) -> bool:
        effect = self._losses.effects[rule]
        return self._sites.context.mode == "act" and isinstance(effect, Combination)

    def _refuse(self, rules: Sequence[str], topic: str, text: str, **named: str) -> None:
        """Raise where a rule cannot combine; where it would only have looked on, say so."""
        context, message = self._sites.context, text.format(**named)
        for rule in rules:
            step = self._sites.counters.of(self._owner(rule)).step
            if self._acts(rule):
                raise GradSurgeonError(f"{context.place(step, rule)}: {message}")
            context.event_log.notice_once(topic, message, rule=rule, step=step, warn=True)


class _Party(NamedTuple):
    """A rule, and the modules that have sent something back which it concerns, in the order of the model."""

    rule: LossRule
    names: list[str]


class _Fork:
    """A tensor while modules may still take it. Kept by the graphs of those that have, and nothing else."""

    def __init__(self, tensor: Tensor, meeting: _Meeting) -> None:
        self.tensor: Tensor | None = tensor
        self._meeting = meeting
        self._version = _torch.writes(tensor)
        self._common: Tensor | None = tensor.view_as(tensor)
        # A view that keeps itself alive would do so for ever.
        _torch.register_hook(self._common, meeting)
        meeting.fork = weakref.ref(self)

    @property
    def taken(self) -> Mapping[str, object]:
        return self._meeting.taken

    def is_of(self, tensor: Tensor) -> bool:
        return self.tensor is tensor and _torch.writes(tensor) == self._version

    def branch(self, module: str, rules: Sequence[NamedRule]) -> Tensor:
        assert self._common is not None  # noqa: S101 # `is_of` tells
        view = self._common.view_as(self._common)
        hook = _ContributionHook(self, self._meeting, module)
        _torch.register_hook(view, hook)
        self._meeting.expect(module, rules, hook)
        return view

    def close(self) -> None:
        """Let go of the tensor: its gradients have met."""
        self.tensor = self._common = None


class _Meeting:
    """Hook on what several modules take: their gradients have come by the time that it is called."""

    __torch_unserializable__ = True

    def __init__(self, shared: SharedInputs, *, is_leaf: bool) -> None:
        self._shared = weakref.ref(shared)
        self.fork: weakref.ref[_Fork] | None = None
        self.rules: list[NamedRule] = []
        # By rule the modules that have taken what it means.
        self.matched: dict[str, set[str]] = {}
        # By module what its calls wait for, as long as their graphs are there.
        self.taken: dict[str, list[weakref.ref[_ContributionHook]]] = {}
        self.passes = 0
        # A checkpoint with use_reentrant=True detaches what it runs again.
        self.in_reentrant = _torch.graph_task() != -1 and is_leaf
        self._task = -1
        self._given: dict[str, Tensor] = {}

    @property
    def __name__(self) -> str:
        return f"{'+'.join(rule.id for rule, _ in self.rules)}:{'+'.join(self.taken)}"

    def expect(self, module: str, rules: Sequence[NamedRule], hook: _ContributionHook) -> None:
        self.taken.setdefault(module, []).append(weakref.ref(hook))
        for named in rules:
            if named.rule.id not in self.matched:
                self.rules.append(named)
            self.matched.setdefault(named.rule.id, set()).add(module)

    def outstanding(self) -> list[str]:
        """Return the modules that can send something back: not those whose output nobody has kept."""
        return [name for name, hooks in self.taken.items() if any(hook() for hook in hooks)]

    def give(self, module: str, grad: Tensor) -> None:
        shared = self._shared()
        if shared is None or is_taken():
            return
        # A pass that has failed, or has not come this far, leaves what is none of the next one's.
        if (task := _torch.graph_task()) != self._task:
            self._task, self._given = task, {}
        with torch.no_grad():
            before = self._given.get(module)
            # A batch of gradients (is_grads_batched) cannot be detached, and need not be.
            one = grad.detach() if grad.requires_grad else grad
            # What autograd holds must not be written to.
            self._given[module] = one if before is None else before + one

    def take(self) -> dict[str, Tensor]:
        given, self._given = self._given, {}
        return given if self._task == _torch.graph_task() else {}

    @uncompiled
    def __call__(self, total: Tensor | None) -> Tensor | None:
        shared = self._shared()
        if total is None or shared is None:
            return None
        fork = None if self.fork is None else self.fork()
        if fork is not None and not (is_taken() or running_passes.returns_gradients()):
            fork.close()
        return shared.arrived(self, total)


class _ContributionHook:
    """Tensor hook that notes what one module sends back."""

    # The fork is there to be kept.
    __slots__ = ("__weakref__", "_fork", "_meeting", "_module")
    __torch_unserializable__ = True

    def __init__(self, fork: _Fork, meeting: _Meeting, module: str) -> None:
        self._fork, self._meeting, self._module = fork, meeting, module

    @property
    def __name__(self) -> str:
        return f"{self._meeting.__name__}:{self._module}"

    @uncompiled
    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None:
            self._meeting.give(self._module, grad)


def _members(program: Program) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for module in program.modules:
        for rule in module.on_shared:
            members.setdefault(rule.id, []).append(module.name)
    return members


def _part(known: InnerProducts, places: Sequence[int]) -> InnerProducts:
    rows = torch.tensor(places, device="cpu")
    products, opposed = known
    of_rows = None if opposed is None else opposed[rows][:, rows]
    return InnerProducts(products[rows][:, rows], of_rows)


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    return " and ".join(map(printable, names))
