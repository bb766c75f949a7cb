"""Tensors that several modules take, as the heads of a network do: what each module sends back to them.

Each module gets a view of the tensor, of which a hook takes the module's own contribution. Autograd sums all
contributions, as it does without rules; a hook on the tensor itself, before all others, then compares them or puts another
sum in the place of theirs. One ordinary backward pass brings all of that.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from threading import RLock

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import Combination, LossRule
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime.activation_rules import ActivationRules, Due, NamedRule
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.loss_gradients import is_taken
from gradsurgeon.runtime.loss_rules import LossRules, pairs, unscaled, weighted_sum
from gradsurgeon.tensors.inner_products import inner_products

_IN_PLACE = (
    "{owner} works in place on the tensor that it shares with others: what it sends back cannot be told from theirs; "
    "let it work out of place"
)
_SHARDED = (
    "left a tensor alone that is divided over ranks (a DTensor): let the module before it return a plain one "
    "(`use_local_output=True`)"
)
_APART = (
    "{missing} took a tensor together with {there} and sends nothing back in this backward pass, which {why}: "
    "what comes in several passes cannot be brought together. Call `.backward()` once, on the sum of the losses"
)
_KEPT = "keeps the graph for another one (retain_graph=True)"
_LATER = "is not the first one through it"
_INSIDE = "runs inside another one (checkpoint with use_reentrant=True; use use_reentrant=False)"


@dataclass(eq=False)
class SharedInput:
    """One tensor that modules have taken, as long as it lives.

    Attributes:
        version: how often it had been written to; later takers take something else.
        is_inside: whether it was taken within a backward pass.
        takers: the modules that have taken it, by rule, in their order.
        contributions: what each of them has sent back in the running pass.
        arrived: the same in the order in which autograd adds it up, of one that was called twice in two parts.
        passes: how many backward passes have come through it.
    """

    version: int
    is_inside: bool
    takers: dict[str, tuple[LossRule, list[str]]] = field(default_factory=dict)
    contributions: dict[str, Tensor] = field(default_factory=dict)
    arrived: list[Tensor] = field(default_factory=list)
    passes: int = 0


class SharedInputs:
    """Runs the rules of a session on what modules send back to a tensor that they all take."""

    def __init__(self, sites: ActivationRules, losses: LossRules) -> None:
        self._sites, self._losses = sites, losses
        self._known: MutableMapping[Tensor, SharedInput] = WeakTensorKeyDictionary()
        # Autograd calls hooks in one thread per device.
        self._lock = RLock()

    def take(self, due: Due, tensor: Tensor, owner: str, *, in_place: bool) -> Tensor:
        """Return what a module is to take in the place of a tensor."""
        rules = [rule for rule, _ in due.grads if isinstance(rule, LossRule)]
        # A parameter that is given to modules is none of their features.
        if not (tensor.requires_grad and torch.is_grad_enabled()) or isinstance(
            tensor, nn.Parameter
        ):
            return tensor
        if self._sites.is_unreadable(tensor, due.grads, owner):
            return tensor
        unfit = _IN_PLACE.format(owner=printable(owner)) if in_place else ""
        if unfit or _dist.is_sharded(tensor):
            self._sites.warn("shared", unfit or _SHARDED, due.grads, owner)
            return tensor
        with self._lock:
            shared = self._known.get(tensor)
            if shared is None or shared.version != _torch.writes(tensor):
                shared = SharedInput(_torch.writes(tensor), _torch.graph_task() != -1)
                self._known[tensor] = shared
                _torch.register_first(tensor, SumHook(self, shared))
            for rule in rules:
                _, takers = shared.takers.setdefault(rule.id, (rule, []))
                if owner not in takers:
                    takers.append(owner)
        view = tensor.view_as(tensor)
        _torch.register_hook(view, ContributionHook(shared, owner))
        return view

    def arrived(self, shared: SharedInput, total: Tensor) -> Tensor:
        """Return the gradient of a shared tensor: what came, or with other weights on what modules sent."""
        with self._lock:
            came, shared.contributions = shared.contributions, {}
            arrived, shared.arrived = shared.arrived, []
            shared.passes += 1
        if self._sites.context.paused:
            return total
        weighed: dict[str, float] = {}
        for rule, takers in shared.takers.values():
            there = [name for name in takers if name in came]
            if missing := [name for name in takers if name not in came]:
                self._refuse_parts(rule, shared, missing, there)
            if len(there) < 2:  # noqa: PLR2004 # nothing to compare
                continue
            self._sites.passes.seen.module = True
            with torch.no_grad(), _torch.aside(total):
                grads = [came[name].detach() for name in there]
                weights = self._weights(rule, there, grads)
            if weights is not None:
                if torch.is_grad_enabled():
                    raise GradSurgeonError(
                        f"rule {rule.id}: a backward pass with create_graph=True goes through what {_named(there)} send "
                        "back, and weights have no gradient of their own; pause the session around it"
                    )
                weighed |= zip(there, weights, strict=True)
        if all(weight == 1.0 for weight in weighed.values()):
            return total
        return _reweighed(total, came, arrived, weighed)

    def _weights(
        self, rule: LossRule, names: Sequence[str], grads: Sequence[Tensor]
    ) -> list[float] | None:
        """Compare, or return the weights of what has come; ``None`` where all of it goes on as it is."""
        losses, context = self._losses, self._sites.context
        step = self._sites.counters.of(names[0]).step
        combines = isinstance(losses.effects[rule.id], Combination)
        known = inner_products([[grad] for grad in grads], grads[:1], compare=not combines)
        if (scale := context.scaling.scale) is not None:
            known = unscaled(known, scale)
        if not combines:
            losses.record_pairs(rule, step, dict(pairs(names, known)))
            return None
        weights = losses.weights(rule, step, names, known)
        return weights if context.mode == "act" else None

    def _refuse_parts(
        self, rule: LossRule, shared: SharedInput, missing: Sequence[str], there: Sequence[str]
    ) -> None:
        """Raise, or warn for a rule that only compares, where a module may send its part in another pass.

        A module that sends nothing is else an ordinary thing: its loss may have no labels in this batch.
        """
        reasons = [
            (shared.is_inside, _INSIDE),
            (_torch.keeps_graph(), _KEPT),
            (shared.passes > 1, _LATER),
        ]
        why = next((text for applies, text in reasons if applies), None)
        if why is None or not there:
            return
        text = _APART.format(missing=_named(missing), there=_named(there), why=why)
        if rule.edits and self._sites.context.mode == "act":
            raise GradSurgeonError(f"rule {rule.id}: {text}")
        self._sites.warn("apart", text, [NamedRule(rule, there[0])], there[0])


class ContributionHook:
    """Tensor hook that notes what one module sends back."""

    __torch_unserializable__ = True

    def __init__(self, shared: SharedInput, owner: str) -> None:
        self._shared, self._owner = shared, owner
        self.__name__ = f"{'+'.join(shared.takers)}:{owner}"

    @uncompiled
    def __call__(self, grad: Tensor | None) -> None:
        # What comes of one loss alone comes again with the pass that trains.
        if grad is None or is_taken():
            return
        came = self._shared.contributions
        self._shared.arrived.append(grad)
        earlier = came.get(self._owner)
        came[self._owner] = grad if earlier is None else earlier + grad


class SumHook:
    """Tensor hook on what several modules have taken, that reaches its session weakly."""

    __torch_unserializable__ = True

    def __init__(self, inputs: SharedInputs, shared: SharedInput) -> None:
        self._inputs = weakref.ref(inputs)
        self._shared = shared

    @property
    def __name__(self) -> str:
        return "+".join(self._shared.takers)

    @uncompiled
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        inputs = self._inputs()
        if grad is None or inputs is None or is_taken():
            return None
        out = inputs.arrived(self._shared, grad)
        return None if out is grad else out


def _reweighed(
    total: Tensor,
    came: Mapping[str, Tensor],
    arrived: Sequence[Tensor],
    weights: Mapping[str, float],
) -> Tensor:
    """Return a sum of contributions, and of what else went into a total, with weights on some of them."""
    # Added up as autograd does it, contributions leave exactly nothing where there is nothing else. To correct the total
    # itself would leave what rounding has made of the largest one, and that may be more than a smaller one has.
    rest = total.to(torch.promote_types(total.dtype, torch.float32)) - reduce(operator.add, arrived)
    terms = [*came.values(), rest]
    out = weighted_sum(terms, [*(weights.get(name, 1.0) for name in came), 1.0])
    return total if out is None else out


def _named(modules: Sequence[str]) -> str:
    return " and ".join(map(printable, modules))
