"""The rules on the gradients of single losses: what they make of them for each parameter, and what they record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Combination, Comparison, LossRule, Rule
from gradsurgeon.compiler import Stage
from gradsurgeon.errors import BindError, GradSurgeonError, did_you_mean, printable
from gradsurgeon.runtime import named_pass
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.drawing import Drawing
from gradsurgeon.runtime.loss_ranks import LossRanks
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.store import Key
from gradsurgeon.tensors.inner_products import (
    InnerProducts,
    inner_products,
    pairs,
)

_HOW = 'write gradsurgeon.backward({"seg": seg_loss, ...}) in the place of the `.backward()` of their sum'

_PLAIN = "their plain sum arrives, as without the rule"


@dataclass(frozen=True, slots=True, eq=False)
class DueLossRule:
    """One rule on losses that is due, with the parameters that it acts on now."""

    rules: LossRules
    rule: LossRule
    tensors: tuple[int, ...]
    params: tuple[Tensor, ...]
    # The ranks that average the pass, and the ids of the parameters that they average.
    groups: _dist.Groups
    averaged: frozenset[int]
    # What there is of losses on these, those of no rule as `REST`.
    losses: frozenset[str]

    @property
    def step(self) -> int:
        return self.rules.context.counters[self.tensors[0]].step


class LossRules:
    """The rules of one session on the gradients of single losses."""

    def __init__(self, context: Context, agreement: RankAgreement) -> None:
        self.context = context
        self.ranks = LossRanks(context, agreement)
        self.effects = {
            rule.id: _compiled(rule) for rule in context.rules if isinstance(rule, LossRule)
        }
        # Those in whose graphs the gradients of single losses have added up to that of their sum.
        self.repeat: set[str] = set()
        # How often calls have given each loss while a rule was due, by its id.
        self._given: dict[str, Counter[str]] = {}
        # What modules send back is combined in the pass that trains alone, which is another sum then.
        self.combines_inputs = any(
            rule.edits for module in context.program.modules for rule in module.on_shared
        )
        # The step and the number in it of the call that has combined last, by the id of the rule.
        self._calls: dict[str, tuple[int, int]] = {}
        # Sinks tell rows apart by the identity of their keys.
        self._keys: dict[Key, Key] = {}

    def due(self, leaves: Sequence[Tensor], given: Collection[str]) -> Iterator[DueLossRule]:
        """Yield the rules on parameters that act on losses now, with those parameters that the losses reach.

        Where ranks average gradients it is all that are matched: they must all measure the same.

        Args:
            leaves: what the losses reach.
            given: what the losses are called.

        Raises:
            GradSurgeonError: a rank that averages the gradients of the parameters lacks the rules.
        """
        for one in self.ranks.agreed(leaves, given):
            params = self.context.parameters.params(one.tensors)
            there = {
                tensor: param
                for tensor, param in zip(one.tensors, params, strict=True)
                if param is not None and param.requires_grad
                if tensor in one.reached or one.groups
                # Refused once the pass has reached it, which its leaves do not tell.
                if not _dist.is_divided(param)
            }
            if there:
                yield DueLossRule(
                    self,
                    one.rule,
                    tuple(there),
                    tuple(there.values()),
                    one.groups,
                    one.averaged,
                    one.losses,
                )

    def note_given(self, due: DueLossRule, losses: Collection[str]) -> None:
        """Take notice of what a call has given; say once that a rule names a loss that never comes, but others do."""
        rule, given = due.rule, self._given.setdefault(due.rule.id, Counter())
        given.update(list(losses))
        unnamed = [name for name in losses if name not in (rule.losses or ())]
        lacking = [name for name in rule.losses or () if name not in given]
        if not (lacking and unnamed):
            return
        hint = did_you_mean(lacking[0], unnamed)
        # The losses of another model may come through this one first, as those of a generator.
        if hint or any(given[name] > 1 for name in unnamed):
            text = (
                f"no loss is called {printable(lacking[0])}; gradsurgeon.backward was given "
                f"{', '.join(map(printable, losses))}{': ' + hint if hint else ''}"
            )
            topic = f"unknown {lacking[0]}"
            self.context.event_log.notice_once(topic, text, rule=rule.id, step=due.step, warn=True)

    def never_given(self) -> Iterator[tuple[LossRule, str]]:
        """Yield the losses that no call has given, with each rule that names them and has been due."""
        for stage in self.context.program.of_losses:
            rule = _loss_rule(stage)
            given = self._given.get(rule.id, ())
            yield from ((rule, name) for name in rule.losses or () if given and name not in given)

    def _due_now(self, rule: Rule, tensors: Iterable[int]) -> list[int]:
        context = self.context
        return [tensor for tensor in tensors if context.is_due(rule, context.counters[tensor])]

    def passed(self, tensors: Sequence[int]) -> None:
        """Take notice of a pass: rules may have seen no single loss of it."""
        for stage in self.context.program.of_losses:
            rule = _loss_rule(stage)
            matched = set(stage.tensors)
            due = self._due_now(rule, (tensor for tensor in tensors if tensor in matched))
            if not due:
                continue
            if (named := named_pass.current()) is not None:
                if rule.id not in self.ranks.resting:
                    named.reached(self, rule, due)
                continue
            name = printable(self.context.program.names[due[0]])
            step = self.context.counters[due[0]].step
            text = f"a backward pass reached {name} without the losses being known: {_HOW}"
            self.context.event_log.notice_once("plain", text, rule=rule.id, step=step, warn=True)

    def run(
        self,
        due: DueLossRule,
        given: Mapping[str, Mapping[int, Tensor | None]],
        scale: Tensor | None,
    ) -> Mapping[str, float] | None:
        """Compare or weigh; return the weights of the losses by name, ``None`` where the plain sum is to arrive.

        Args:
            due: the rule.
            given: of each loss its gradients, by the ids of the parameters.
            scale: what a scaler has multiplied all of them by.
        """
        rule, losses = due.rule, due.rule.losses or ()
        rows = [[given.get(name, {}).get(id(param)) for param in due.params] for name in losses]
        effect = self.effects[rule.id]
        if not isinstance(effect, Combination):
            self.record_pairs(rule, due.step, self._compared(due, effect.per, losses, rows, scale))
            return None
        self._tell_of_own(due)
        known = self._products(due, rows, scale)
        weights = self.weights(rule, due.step, losses, known, due.groups)
        if weights is None or self.context.mode == "observe":
            return None
        return dict(zip(losses, weights, strict=True))

    def _tell_of_own(self, due: DueLossRule) -> None:
        """Say once that a rule that combines has parameters that the ranks do not average with the others."""
        pairs = zip(due.tensors, due.params, strict=True)
        own = [tensor for tensor, param in pairs if due.groups and id(param) not in due.averaged]
        if own:
            name = printable(self.context.program.names[own[0]])
            text = (
                f"DistributedDataParallel does not average {name}: the weights follow from the others alone, and it gets "
                "its losses with these weights"
            )
            self.context.event_log.notice_once("own", text, rule=due.rule.id, step=due.step)

    def weights(
        self,
        rule: LossRule,
        step: int,
        names: Sequence[str],
        known: InnerProducts,
        groups: _dist.Groups = (),
    ) -> list[float] | None:
        """Return the weight of each gradient and record them; ``None`` where the plain sum is to arrive.

        Args:
            rule: one that combines.
            step: the number of the update that is fed.
            names: what the gradients are called.
            known: their inner products.
            groups: the ranks that must have the same weights.
        """
        event_log, products = self.context.event_log, known.products
        effect = self.effects[rule.id]
        assert isinstance(effect, Combination)  # noqa: S101 # of a rule that combines
        event_log.count_fired(rule.id, step)
        if culprits := _nonfinite(names, products):
            # One that meets other ranks in its pass (`SyncBatchNorm`) is in those of all.
            some = " or ".join(map(printable, culprits))
            text = f"the gradient of {some} is not finite: {_PLAIN}, for a trap or a scaler to see"
            event_log.notice_once(f"loss {some}", text, rule=rule.id, step=step)
            return None
        try:
            with Drawing(rule.id, step, self._call(rule, step)):
                weights = effect.weigh(products)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            text = f"no weights could be had for {', '.join(map(printable, names))}: {printable(str(error))}; {_PLAIN}"
            event_log.notice_once("weights", text, rule=rule.id, step=step, warn=True)
            return None
        if groups:
            # They follow from the same numbers; what a solver makes of them on another processor may differ.
            first = _dist.rank() == min(_dist.members(groups[0]))
            weights = _dist.reduce(weights if first else torch.zeros_like(weights), groups[:1])
        self._record(rule, "weight", step, names, weights)
        change = weights - 1.0
        total, moved = (
            math.sqrt(max(0.0, float(one @ products @ one)))
            for one in (torch.ones_like(change), change)
        )
        distance = moved / total if total else math.inf if moved else 0.0
        self._record(rule, "distance", step, ("combined",), torch.tensor([distance], device="cpu"))
        event_log.count_changed(rule.id, int(moved > 0.0))
        return [float(weight) for weight in weights]

    def _call(self, rule: LossRule, step: int) -> int:
        """Return which call of a rule in a step this is, from 0."""
        last, call = self._calls.get(rule.id, (step, -1))
        call = call + 1 if last == step else 0
        self._calls[rule.id] = step, call
        return call

    def record_pairs(
        self, rule: LossRule, step: int, compared: Mapping[str, tuple[float, float, float]]
    ) -> None:
        """Record cosine, ratio and opposed share of pairs by name."""
        for stat, values in zip(rule.stats, zip(*compared.values(), strict=True), strict=True):
            self._record(rule, stat, step, tuple(compared), torch.tensor(values, device="cpu"))
        self.context.event_log.count_fired(rule.id, step)

    def _compared(
        self,
        due: DueLossRule,
        per: str,
        losses: Sequence[str],
        rows: Sequence[Sequence[Tensor | None]],
        scale: Tensor | None,
    ) -> dict[str, tuple[float, float, float]]:
        names = self.context.program.names
        places: dict[str, list[int]] = {}
        for place, tensor in enumerate(due.tensors):
            name = names[tensor]
            group = {"parameter": name, "module": name.rpartition(".")[0]}.get(per, "")
            places.setdefault(group, []).append(place)
        compared: dict[str, tuple[float, float, float]] = {}
        for group, some in places.items():
            tensors = tuple(due.tensors[place] for place in some)
            params = tuple(due.params[place] for place in some)
            part = replace(due, tensors=tensors, params=params)
            known = self._products(
                part, [[row[p] for p in some] for row in rows], scale, compare=True
            )
            prefix = f"{group}:" if group else ""
            compared |= {f"{prefix}{pair}": numbers for pair, numbers in pairs(losses, known)}
        return compared

    def _products(
        self,
        due: DueLossRule,
        rows: Sequence[Sequence[Tensor | None]],
        scale: Tensor | None,
        *,
        compare: bool = False,
    ) -> InnerProducts:
        """Return the inner products of gradients in true units, of their averages where ranks average them."""
        params, average = due.params, None
        places = [place for place, param in enumerate(params) if id(param) in due.averaged]
        if places:
            # What other ranks have of the others is not that of these parameters.
            params = tuple(params[place] for place in places)
            rows = [[row[place] for place in places] for row in rows]
            average = partial(_averaged, group=due.groups[0])
        known = inner_products(rows, params, average, compare=compare)
        return known if scale is None else known.unscaled(scale)

    def _record(
        self, rule: LossRule, stat: str, step: int, names: Sequence[str], values: Tensor
    ) -> None:
        key = Key(rule.id, stat, rule.point, tuple(names))
        key = self._keys.setdefault(key, key)
        columns = range(len(names))
        self.context.recorder.add(key, step, columns, values.float(), replace=False)


def _loss_rule(stage: Stage) -> LossRule:
    return cast("LossRule", stage.rule)


def _compiled(rule: LossRule) -> Combination | Comparison:
    try:
        return rule.compile()
    except GradSurgeonError as error:  # a library is missing
        raise BindError([f"rule {rule.id}: {error}"]) from error


def _nonfinite(losses: Sequence[str], products: Tensor) -> list[str]:
    finite = products.diagonal().isfinite().tolist()
    return [name for name, fine in zip(losses, finite, strict=True) if not fine]


def _averaged(block: Tensor, group: object) -> Tensor:
    return _dist.reduce(block, (group,)) / len(_dist.members(group))
