"""Rules on the gradients of several losses or modules: weights and records, and the rules that act in a pass on all ranks."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Combination, Comparison, LossRule
from gradsurgeon.errors import BindError, GradSurgeonError, did_you_mean, printable
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.store import Key
from gradsurgeon.tensors.inner_products import Contributions, InnerProducts, pairs

_PLAIN = "the parameters get the plain sum, as without the rule"


@dataclass(frozen=True, slots=True, eq=False)
class DueLossRule:
    """A rule on losses that acts now.

    Attributes:
        effects: the effects of the rules of its session.
        rule: the rule.
        step: the number of the update that the pass feeds.
        senders: the losses or modules whose gradients the rule uses.
        params: the tensors that get these gradients, parameters by their numbers.
        groups: the ranks that average the pass; empty if this rank acts alone.
        averaged: the ids of the parameters that these ranks average.
        losses: the losses that some of these ranks have, with `REST` for all losses that no rule names.
    """

    effects: LossEffects
    rule: LossRule
    step: int
    senders: Sequence[str]
    params: Mapping[int, Tensor]
    groups: _dist.Groups = ()
    averaged: frozenset[int] = frozenset()
    losses: frozenset[str] = frozenset()

    def name(self, number: int) -> str:
        return printable(self.effects.context.program.names[number])


class LossEffects:
    """Compares and weighs gradients for the rules of one session."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._effects = {
            rule.id: _compiled(rule) for rule in context.rules if isinstance(rule, LossRule)
        }
        # Ids of rules whose single-loss gradients were verified to add up to the gradient of the sum.
        self.verified: set[str] = set()
        # Rules on modules combine in the training pass alone, so its gradients differ from the plain sum.
        self._combines_inputs = any(
            rule.edits for module in context.program.modules for rule in module.on_shared
        )
        # By rule, the step of the last call that combined, and the number of the call within this step.
        self._calls: dict[str, tuple[int, int]] = {}
        # Cached, because sinks distinguish rows by the identity of their keys.
        self._keys: dict[Key, Key] = {}

    def acts(self, rule: str) -> bool:
        """Return whether a rule changes gradients."""
        return self.context.mode == "act" and isinstance(self._effects[rule], Combination)

    def is_unverified(self, rule: str) -> bool:
        """Return whether a rule still must check that the gradients of single losses add up."""
        return rule not in self.verified and not self._combines_inputs

    def run(self, due: DueLossRule, given: Contributions) -> dict[str, float] | None:
        """Compare or combine; return the weight of each sender, ``None`` if parameters get the plain sum."""
        effect = self._effects[due.rule.id]
        if isinstance(effect, Comparison):
            self._compare(due, effect.per, given)
            return None
        weights = self._weights(due, effect, given)
        return weights if self.acts(due.rule.id) else None

    def _compare(self, due: DueLossRule, per: str, given: Contributions) -> None:
        """Record cosine, norm ratio and opposed share of each pair."""
        parts: dict[str, list[Tensor]] = {}
        for number, param in due.params.items():
            name = "" if per == "rule" else self.context.program.names[number]
            part = name.rpartition(".")[0] if per == "module" else name
            parts.setdefault(part, []).append(param)
        compared: dict[str, tuple[float, float, float]] = {}
        for part, params in parts.items():
            known = _products(due, params, given, compare=True)
            prefix = f"{part}:" if part else ""
            compared |= {f"{prefix}{pair}": numbers for pair, numbers in pairs(due.senders, known)}
        for stat, values in zip(due.rule.stats, zip(*compared.values(), strict=True), strict=True):
            self._record(due, stat, tuple(compared), torch.tensor(values, device="cpu"))
        self.context.event_log.count_fired(due.rule.id, due.step)

    def _weights(
        self, due: DueLossRule, effect: Combination, given: Contributions
    ) -> dict[str, float] | None:
        """Return the weight of each sender and record it; ``None`` if parameters get the plain sum."""
        rule, step, event_log = due.rule.id, due.step, self.context.event_log
        self._tell_of_own(due)
        products = _products(due, list(due.params.values()), given).products
        event_log.count_fired(rule, step)
        finite = zip(due.senders, products.diagonal().isfinite().tolist(), strict=True)
        if some := " or ".join(printable(sender) for sender, is_finite in finite if not is_finite):
            # Under `SyncBatchNorm`, one non-finite loss makes the gradients of all losses non-finite.
            text = (
                f"the gradient of {some} is non-finite: {_PLAIN}, so a trap or a scaler can see it"
            )
            event_log.notice_once(f"loss {some}", text, rule=rule, step=step)
            return None
        problem = "the weights are non-finite"
        last, call = self._calls.get(rule, (step, -1))
        call = call + 1 if last == step else 0
        self._calls[rule] = step, call
        try:
            with _drawing(f"{rule}/{step}/{call}"):
                weights = effect.weigh(products)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            weights, problem = torch.full_like(products[0], math.nan), printable(str(error))
        if due.groups:
            # All ranks have equal products, but on another processor a solver may find other weights, or none.
            first = _dist.rank() == min(_dist.members(due.groups[0]))
            weights = _dist.reduce(weights if first else torch.zeros_like(weights), due.groups[:1])
        if not weights.isfinite().all():
            names = ", ".join(map(printable, due.senders))
            text = f"the solver found no weights for {names}: {problem}; {_PLAIN}"
            event_log.notice_once("weights", text, rule=rule, step=step, warn=True)
            return None
        self._record(due, "weight", due.senders, weights)
        change = weights - 1.0
        total, moved = (
            math.sqrt(max(0.0, float(one @ products @ one)))
            for one in (torch.ones_like(change), change)
        )
        distance = moved / total if total else math.inf if moved else 0.0
        self._record(due, "distance", ("combined",), torch.tensor([distance], device="cpu"))
        event_log.count_changed(rule, int(moved > 0.0))
        return dict(zip(due.senders, map(float, weights), strict=True))

    def _tell_of_own(self, due: DueLossRule) -> None:
        """Emit a notice, once, if the ranks do not average all parameters of a rule that combines."""
        own = [n for n, param in due.params.items() if due.groups and id(param) not in due.averaged]
        if own:
            text = (
                f"DistributedDataParallel does not average {due.name(own[0])}: the loss weights are computed from the other "
                "parameters alone, and also apply to this parameter"
            )
            self.context.event_log.notice_once("own", text, rule=due.rule.id, step=due.step)

    def _record(self, due: DueLossRule, stat: str, columns: Iterable[str], values: Tensor) -> None:
        key = Key(due.rule.id, stat, due.rule.point, tuple(columns))
        key = self._keys.setdefault(key, key)
        self.context.recorder.add(key, due.step, range(len(values)), values.float(), replace=False)


def _compiled(rule: LossRule) -> Combination | Comparison:
    try:
        return rule.compile()
    except GradSurgeonError as error:  # a library is missing
        raise BindError([f"rule {rule.id}: {error}"]) from error


def _products(
    due: DueLossRule, params: Sequence[Tensor], given: Contributions, *, compare: bool = False
) -> InnerProducts:
    """Return the inner products of gradients, or of averaged gradients if ranks average some of them."""
    # If ranks average some parameters, the others are left out: their gradients differ between ranks.
    averaged = [param for param in params if id(param) in due.averaged]
    if not averaged:
        return given.products(due.senders, params, compare=compare)
    groups, number = due.groups[:1], len(_dist.members(due.groups[0]))
    return given.products(
        due.senders, averaged, lambda block: _dist.reduce(block, groups) / number, compare=compare
    )


@contextmanager
def _drawing(call: str) -> Iterator[None]:
    """Give drawing on the host a state of its own; afterwards the script draws as if nothing had happened.

    The seed derives from the script's seed, the rule, the step and the call. So a resumed run draws the numbers of an
    uninterrupted run.
    """
    digest = hashlib.sha256(f"{torch.initial_seed()}/{call}".encode()).digest()
    # The script may have set another default device.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # 63 bits, because no release of torch reads such a seed as a negative number.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield


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
    """A backward pass of named losses.

    Attributes:
        astray: the ids of the parameters that got a gradient in this pass, but none from a single loss.
        problem: why the pass cannot train with the rules, if it cannot.
    """

    def __init__(self, due: Sequence[DueLossRule]) -> None:
        self._seen = {(one.effects, one.rule.id): set(one.params) for one in due}
        self.astray: set[int] = set()
        self.problem = ""

    def reached(self, effects: LossEffects, rule: LossRule, tensors: Sequence[int]) -> None:
        """Compare the parameters that got gradients with the parameters that rules expected; set `problem`."""
        seen, context = self._seen.get((effects, rule.id), ()), effects.context
        for tensor in tensors:
            param = context.parameters.param(tensor)
            is_divided = _dist.is_divided(param)
            if not self.problem and (is_divided or tensor not in seen or id(param) in self.astray):
                name = printable(context.program.names[tensor])
                text = _DIVIDED if is_divided else _ASTRAY
                self.problem = text.format(rule=rule.id, name=name)


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
        # By rule id, how often calls passed each loss while the rule was due.
        self._given: dict[str, Counter[str]] = {}
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
        context = self.context
        reached, keys = set(context.parameters.owned(leaves)), set(map(id, leaves))
        # A paused session does this too: other ranks may wait for it.
        scheduled = [
            (rule, matched, tensors)
            for rule, matched in self._stages
            if (tensors := [t for t in matched if rule.steps.due(context.counters[t].step)])
        ]
        names = [*dict.fromkeys(name for rule, _, _ in scheduled for name in rule.losses or ())]
        losses = set(given or ())
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
            if not reaches or paused or is_plain:
                continue
            if params := self._params(tensors, None if groups else reached):
                senders, step = rule.losses or (), context.counters[next(iter(params))].step
                on_ranks = zip((*names, REST), there, strict=True)
                some = frozenset(name for name, is_there in on_ranks if is_there)
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
    ) -> list[bool]:
        """Return which facts hold on any rank. Warn once if another rank is paused or runs a plain pass."""
        if not groups:
            return list(facts)
        self._agreement.roll(groups)
        rank = _dist.rank()
        mine = torch.tensor([(rank + 1) * fact for fact in facts], device="cpu")
        largest = _dist.reduce(mine, groups, "max").tolist()
        for other, fact, why in zip(largest[1:3], facts[1:3], RESTS, strict=True):
            if other and not fact and not self.context.paused:
                log, text = self.context.event_log, why.format(rank=other - 1)
                log.notice_once(why, text, rule=rule.id, step=step, warn=True)
        return list(map(bool, largest))

    def _note_given(self, rule: LossRule, step: int, losses: Sequence[str]) -> None:
        """Warn once if a rule names a loss that no call passes, and calls pass other losses instead."""
        given = self._given.setdefault(rule.id, Counter())
        given.update(losses)
        unnamed = [name for name in losses if name not in (rule.losses or ())]
        lacking = [name for name in rule.losses or () if name not in given]
        if not (lacking and unnamed):
            return
        hint = did_you_mean(lacking[0], unnamed)
        # Losses of another model, such as a generator, may pass through this model first.
        if hint or any(given[name] > 1 for name in unnamed):
            text = (
                f"no loss is called {printable(lacking[0])}; gradsurgeon.backward got "
                f"{', '.join(map(printable, losses))}{': ' + hint if hint else ''}"
            )
            topic = f"unknown {lacking[0]}"
            self.context.event_log.notice_once(topic, text, rule=rule.id, step=step, warn=True)

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
            if not due:
                continue
            if named is None:
                text = _UNKNOWN.format(name=printable(context.program.names[due[0]]))
                step = context.counters[due[0]].step
                context.event_log.notice_once("plain", text, rule=rule.id, step=step, warn=True)
            elif rule.id not in self._resting:
                named.reached(self.effects, rule, due)


def in_order(sessions: Collection[LossRules]) -> list[LossRules]:
    """Return sessions in the order that all ranks share."""
    return sorted(sessions, key=lambda one: one.order)
