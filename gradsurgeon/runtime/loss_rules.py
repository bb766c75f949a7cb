"""Rules on the gradients of named losses: which act in a pass, on all ranks alike, and how parameters get what they made."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon._torch import uncompiled
from gradsurgeon.actions import LossRule
from gradsurgeon.errors import GradSurgeonError, did_you_mean, printable
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.loss_effects import DueLossRule, LossEffects
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.tensors.inner_products import weighted_sum

# The sum of the losses that no rule names. No loss has this name: names of losses are not empty.
REST = ""

# Two reasons of one rank that make all ranks use the plain sum: the rank is paused, or its pass is plain.
RESTS = (
    "rank {rank} is paused: all ranks use the plain sum of the losses",
    "rank {rank} runs a plain `.backward()` while this rank passes named losses: all ranks use the plain sum",
)
_ALONE = (
    "DistributedDataParallel does not average this pass (`no_sync`, or a pass of the model inside the wrapper): each rank "
    "uses its own losses alone"
)
_UNKNOWN = (
    "a backward pass reached {name} without the losses being known: call "
    'gradsurgeon.backward({{"seg": seg_loss, ...}}) instead of `.backward()` on the sum of the losses'
)
# The gradients of single losses must add up to the gradient of their sum, except for rounding, which is large in half
# precision.
_TOLERANCE, _ROUNDING = 0.05, 1e-3
_TWICE = (
    "rule {rule}: the gradients that the single losses give {name} do not add up to the gradient of their sum (off by "
    "{off:.3g} of {size:.3g}): the graph cannot be run twice. Possible causes: a custom autograd function that writes to "
    "its saved tensors, or a checkpoint that draws other random numbers (preserve_rng_state=False)"
)
_ASTRAY = (
    "rule {rule}: {name} got a gradient that no single loss gives it: part of the graph cannot be run for one loss "
    "alone, as with checkpoint(use_reentrant=True); use use_reentrant=False"
)
_DIVIDED = (
    "rule {rule}: the parameter {name} is sharded (fully_shard, FullyShardedDataParallel, tensor parallelism), so the "
    "gradients of single losses cannot be taken: combine at the inputs of the heads, `modules: [...]` and "
    "`tensor: input.grad`"
)


class NamedPass:
    """A backward pass of the sum of named losses: parameters get combined gradients, and these are checked."""

    def __init__(self, due: Sequence[DueLossRule]) -> None:
        self._expected = {(one.effects, one.rule.id): set(one.params) for one in due}
        self._params = {id(param): param for one in due for param in one.params.values()}
        # Each rule checks once whether the passes agree; after that only the combined gradients are kept.
        self._asked = [one for one in due if one.rule.id not in one.effects.verified]
        self._accumulation = _torch.Accumulation()
        # The ids of the parameters that single losses gave a gradient; ``None`` if no gradients were taken.
        self._given: frozenset[int] | None = None
        # The ids of the parameters that got a gradient in this pass, but none from a single loss.
        self._astray: set[int] = set()
        self._problem = ""
        self._combined: dict[int, Tensor] = {}
        # By parameter, the sum of the gradients of single losses, and the sum of their norms. If losses cancel,
        # rounding is small next to each gradient, but not next to their sum.
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        # By parameter, the norm of the difference between the passes, and the sum of all norms.
        self._differences: dict[int, tuple[Tensor, Tensor]] = {}

    def take(
        self, grads: dict[int, dict[str, Tensor]], weights: Mapping[int, Mapping[str, float]]
    ) -> None:
        """Combine the gradients of single losses, and remove them from ``grads`` to free one copy per loss.

        Args:
            grads: the gradients by the ids of the parameters and then by loss.
            weights: the weights of the losses, by the ids of the parameters to combine.
        """
        self._given = frozenset(grads)
        asked = {id(param) for one in self._asked for param in one.params.values()}
        for key in self._given:
            column = grads.pop(key)
            if key in asked:
                norms = torch.stack([_numbers.norm(grad) for grad in column.values()])
                self._sums[key] = weighted_sum(column, {}), norms.sum()
            if key in weights:
                self._combined[key] = weighted_sum(column, weights[key])

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Give parameters their combined gradients within the context; afterwards check the passes.

        Raises:
            GradSurgeonError: the passes of single losses prove nothing about this pass.
        """
        token = current.set(self)
        params = list(self._params.values()) if self._given is not None else []
        handles = [_torch.register_first(param, self._hook(param)) for param in params]
        try:
            yield
        finally:
            current.reset(token)
            for handle in handles:
                handle.remove()
            for param in params:
                _torch.forget_empty_hooks(param)
        self._check()
        if self._problem:
            raise GradSurgeonError(self._problem)

    def _hook(self, param: Tensor) -> Callable[[Tensor], Tensor | None]:
        key = id(param)

        @uncompiled
        def deliver(grad: Tensor | None) -> Tensor | None:
            # A hook of the script may call `torch.autograd.grad` meanwhile: such passes are ignored.
            if grad is None or not self._accumulation.runs(param):
                return None
            if key not in (self._given or ()):
                self._astray.add(key)
            elif (known := self._sums.pop(key, None)) is not None:
                total, size = known
                with torch.no_grad():
                    self._differences[key] = _numbers.norm(grad - total), _numbers.norm(grad) + size
            return self._combined.pop(key, None)

        deliver.__name__ = "gradsurgeon.backward"
        return deliver

    def reached(self, effects: LossEffects, rule: LossRule, tensors: Sequence[int]) -> None:
        """Compare the parameters that got gradients with the parameters that a rule expected."""
        expected, context = self._expected.get((effects, rule.id), ()), effects.context
        for tensor in tensors if not self._problem else ():
            param = context.parameters.param(tensor)
            is_divided = _dist.is_divided(param)
            if is_divided or tensor not in expected or id(param) in self._astray:
                name = printable(context.program.names[tensor])
                text = _DIVIDED if is_divided else _ASTRAY
                self._problem = text.format(rule=rule.id, name=name)
                return

    def _check(self) -> None:
        """Refuse a graph in which the gradients of single losses do not add up to the gradient of their sum."""
        known = {key: (float(off), float(size)) for key, (off, size) in self._differences.items()}
        for one in self._asked:
            found = [(n, *known[id(p)]) for n, p in one.params.items() if id(p) in known]
            # A gradient of pure rounding, such as of a bias before a batch norm, differs in every pass.
            least = _ROUNDING * math.hypot(*(size for _, _, size in found))
            for number, off, size in found:
                if off > max(least, _TOLERANCE * size):
                    name = one.name(number)
                    raise GradSurgeonError(
                        _TWICE.format(rule=one.rule.id, name=name, off=off, size=size)
                    )
            # Non-finite gradients prove nothing about the graph, so the rule stays unverified.
            if found and math.isfinite(least):
                one.effects.verified.add(one.rule.id)


# The pass of named losses that this thread runs.
current: ContextVar[NamedPass | None] = ContextVar("current", default=None)


class LossRules:
    """The rules of one session on parameters that take the gradient of each loss.

    Attributes:
        effects: the effects of these rules.
        order: the key by which ranks sort their sessions; equal on all ranks, in whatever order they were applied.
    """

    def __init__(self, context: Context, agreement: RankAgreement) -> None:
        self.context, self._agreement = context, agreement
        self.effects = LossEffects(context)
        self._stages = [
            (cast("LossRule", stage.rule), stage.tensors) for stage in context.program.of_losses
        ]
        rules = [rule.model_dump_json() for rule, _ in self._stages]
        self.order = (*rules, *context.program.names)
        # By rule id, the losses that calls passed while the rule was due.
        self._given: dict[str, set[str]] = {}
        # Ids of the rules that rested in the last pass, because some rank was paused or ran a plain pass.
        self._resting: set[str] = set()

    def due(self, leaves: Sequence[Tensor], given: Collection[str] | None) -> list[DueLossRule]:
        """Return the rules that act in a pass. Runs a collective if ranks average the pass.

        If ranks average gradients, a rule acts on all parameters that it matches: ranks must measure equal tensors.

        Args:
            leaves: the leaves that the pass reaches.
            given: the names of its losses; ``None`` for a plain pass, in which no rule acts.

        Raises:
            GradSurgeonError: a rank that averages the gradients of the parameters lacks the rules.
        """
        context, losses = self.context, set(given or ())
        reached, keys = set(context.parameters.owned(leaves)), set(map(id, leaves))
        # A paused session does this too: other ranks may wait for it.
        scheduled = [
            (rule, matched, tensors)
            for rule, matched in self._stages
            if (tensors := [t for t in matched if rule.steps.due(context.counters[t].step)])
        ]
        names = [*dict.fromkeys(name for rule, _, _ in scheduled for name in rule.losses or ())]
        # Whether this rank has each named loss, and whether it has others.
        here = [*(name in losses for name in names), not losses.issubset(names)]
        acting: list[DueLossRule] = []
        for rule, matched, tensors in scheduled:
            groups, averaged = context.ranks.averaging(matched, keys)
            reaches, step = not reached.isdisjoint(tensors), context.counters[tensors[0]].step
            is_alone = reaches and not groups and not losses.isdisjoint(rule.losses or ())
            if is_alone and context.ranks.wrappers_of(matched):
                context.event_log.notice_once("alone", _ALONE, rule=rule.id, step=step)
            facts = [reaches, context.paused, given is None, *here]
            reaches, paused, is_plain, *there = self._on_any(rule, step, groups, facts)
            (self._resting.add if paused or is_plain else self._resting.discard)(rule.id)
            # Ranks that average know no better which parameters the others reach.
            params = self._params(tensors, None if groups else reached)
            if not reaches or paused or is_plain or not params:
                continue
            step = context.counters[next(iter(params))].step
            on_ranks = zip((*names, REST), there, strict=True)
            some = frozenset(name for name, is_there in on_ranks if is_there)
            senders = rule.losses or ()
            acting.append(
                DueLossRule(self.effects, rule, step, senders, params, groups, averaged, some)
            )
            self._note_given(rule, step, list(given or ()))
        return acting

    def _params(self, tensors: Sequence[int], reached: Collection[int] | None) -> dict[int, Tensor]:
        """Return the matched parameters that get a gradient in a pass; ``reached`` is ``None`` if it is unknown."""
        params = zip(tensors, self.context.parameters.params(tensors), strict=True)
        return {
            tensor: param
            for tensor, param in params
            if param is not None and param.requires_grad
            if reached is None or tensor in reached
            # A sharded parameter is refused once the pass reached it: the leaves of the graph do not show it.
            if not _dist.is_divided(param)
        }

    def _on_any(
        self, rule: LossRule, step: int, groups: _dist.Groups, facts: Sequence[bool]
    ) -> Sequence[bool]:
        """Return which facts hold on any rank. Warn once if another rank is paused or runs a plain pass."""
        if not groups:
            return facts
        self._agreement.roll(groups)
        mine = torch.tensor([(_dist.rank() + 1) * fact for fact in facts], device="cpu")
        largest = _dist.reduce(mine, groups, "max").tolist()
        for other, fact, why in zip(largest[1:3], facts[1:3], RESTS, strict=True):
            if other and not fact and not self.context.paused:
                log, text = self.context.event_log, why.format(rank=other - 1)
                log.notice_once(why, text, rule=rule.id, step=step, warn=True)
        return list(map(bool, largest))

    def _note_given(self, rule: LossRule, step: int, losses: Sequence[str]) -> None:
        """Warn once if a rule names a loss that no call passes, and calls pass other losses instead."""
        given = self._given.setdefault(rule.id, set())
        unnamed = [name for name in losses if name not in (rule.losses or ())]
        # Losses of another model, such as a generator, may pass through this model first.
        again = not given.isdisjoint(unnamed)
        given.update(losses)
        for lacking in rule.losses or () if unnamed else ():
            hint = did_you_mean(lacking, unnamed)
            if lacking not in given and (hint or again):
                text = (
                    f"no loss is called {printable(lacking)}; gradsurgeon.backward got "
                    f"{', '.join(map(printable, losses))}{': ' + hint if hint else ''}"
                )
                log = self.context.event_log
                log.notice_once(f"unknown {lacking}", text, rule=rule.id, step=step, warn=True)
                return

    def never_given(self) -> Iterator[tuple[LossRule, str]]:
        """Yield each rule that was due, with each loss that it names and that no call passed."""
        for rule, _ in self._stages:
            given = self._given.get(rule.id, ())
            yield from ((rule, name) for name in rule.losses or () if given and name not in given)

    def passed(self, tensors: Sequence[int]) -> None:
        """Check the gradients that a pass left: warn if the losses were unknown, else compare the parameters."""
        context, named = self.context, current.get()
        for rule, matched in self._stages:
            among = set(matched)
            due = [t for t in tensors if t in among and context.is_due(rule, context.counters[t])]
            if due and named is None:
                text = _UNKNOWN.format(name=printable(context.program.names[due[0]]))
                step = context.counters[due[0]].step
                context.event_log.notice_once("plain", text, rule=rule.id, step=step, warn=True)
            elif named is not None and rule.id not in self._resting:
                named.reached(self.effects, rule, due)


def in_order(sessions: Collection[LossRules]) -> list[LossRules]:
    """Return sessions in the order that all ranks share."""
    return sorted(sessions, key=lambda one: one.order)
