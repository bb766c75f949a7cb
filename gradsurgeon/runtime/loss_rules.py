"""The rules on the gradients of single losses: what they make of them for each parameter, and what they record."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Combination, Comparison, LossRule, Rule
from gradsurgeon.compiler import Stage
from gradsurgeon.errors import BindError, GradSurgeonError, printable
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.store import Key
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.inner_products import (
    InnerProducts,
    inner_products,
    pairs,
    weighted_sum,
)

_FSDP = (
    "the gradients of single losses cannot be had of parameters that are sharded (fully_shard, "
    "FullyShardedDataParallel, tensor parallelism), as {name} is: combine where the heads take their features, `modules: [...]` and "
    "`tensor: input.grad`"
)
_HOW = 'write gradsurgeon.backward({"seg": seg_loss, ...}) in the place of the `.backward()` of their sum'

_PLAIN = "their plain sum arrives, as without the rule"
_RESTS = (
    "rank {rank} is paused: the plain sum of the losses arrives on all ranks",
    "rank {rank} runs a plain `.backward()` where this one passes named losses: their plain sum arrives on all ranks",
)


class NamedPass:
    """The backward pass of named losses that a thread runs, and what rules have seen of them."""

    def __init__(self, due: Sequence[DueLossRule]) -> None:
        self._seen = {(one.rules, one.rule.id): set(one.tensors) for one in due}
        # What has got a gradient although no loss alone gives it one.
        self.unseen: list[str] = []

    def reached(self, rules: LossRules, rule: LossRule, tensors: Sequence[int]) -> None:
        seen, context = self._seen.get((rules, rule.id), ()), rules.context
        for tensor in tensors:
            name = context.program.names[tensor]
            if _dist.is_divided(context.parameters.param(tensor)):
                self.unseen.append(f"rule {rule.id}: {_FSDP.format(name=printable(name))}")
            elif tensor not in seen:
                self.astray(rule, name)

    def astray(self, rule: LossRule, name: str) -> None:
        self.unseen.append(
            f"rule {rule.id}: {printable(name)} has got a gradient that no single loss gives it: part of the graph cannot "
            "be gone through for one loss alone, as with checkpoint(use_reentrant=True); use use_reentrant=False"
        )


class _Thread(threading.local):
    named: NamedPass | None = None


_thread = _Thread()


@contextmanager
def running(named: NamedPass) -> Iterator[None]:
    before, _thread.named = _thread.named, named
    try:
        yield
    finally:
        _thread.named = before


@dataclass(frozen=True, slots=True, eq=False)
class DueLossRule:
    """One rule on losses that is due, with the parameters that it acts on now."""

    rules: LossRules
    rule: LossRule
    tensors: tuple[int, ...]
    params: tuple[Tensor, ...]

    @property
    def step(self) -> int:
        return self.rules.context.counters[self.tensors[0]].step


class LossRules:
    """The rules of one session on the gradients of single losses."""

    def __init__(self, context: Context, agreement: RankAgreement) -> None:
        self.context, self._agreement = context, agreement
        self.effects = {
            rule.id: _compiled(rule) for rule in context.rules if isinstance(rule, LossRule)
        }
        # Those in whose graphs the gradients of single losses have added up to that of their sum.
        self.repeat: set[str] = set()
        # The rules that had a rest in the last call, because some rank has paused.
        self._resting: set[str] = set()
        # What calls have given of the losses that a rule names, by its id.
        self._given: dict[str, set[str]] = {}
        # What modules send back is combined in the pass that trains alone, which is another sum then.
        self.combines_inputs = any(
            rule.edits for module in context.program.modules for rule in module.on_shared
        )
        # Sinks tell rows apart by the identity of their keys.
        self._keys: dict[Key, Key] = {}

    def due(self, leaves: Sequence[Tensor]) -> Iterator[DueLossRule]:
        """Yield the rules on parameters that act on losses now, with those parameters that the losses reach.

        Where ranks average gradients it is all that are matched: they must all measure the same.

        Args:
            leaves: what the losses reach.

        Raises:
            GradSurgeonError: a rank that averages the gradients of the parameters lacks the rules.
        """
        for rule, stage, reached, groups in self._agreed(leaves, plain=False):
            tensors = self._scheduled(rule, stage)
            params = self.context.parameters.params(tensors)
            there = {
                tensor: param
                for tensor, param in zip(tensors, params, strict=True)
                if param is not None and param.requires_grad and (tensor in reached or groups)
                # Refused once the pass has reached it, which its leaves do not tell.
                if not _dist.is_divided(param)
            }
            if there:
                yield DueLossRule(self, rule, tuple(there), tuple(there.values()))

    def tell_of_plain_pass(self, graph: BackwardGraph) -> None:
        """Let all ranks have the plain sum of a pass in which this one passes no named losses. A collective."""
        if _thread.named is None and self.context.program.of_losses and _dist.world() > 1:
            for _ in self._agreed(list(graph.leaves()), plain=True):
                pass

    def _scheduled(self, rule: LossRule, stage: Stage) -> list[int]:
        counters = self.context.counters
        return [tensor for tensor in stage.tensors if rule.steps.due(counters[tensor].step)]

    def _agreed(
        self, leaves: Sequence[Tensor], *, plain: bool
    ) -> Iterator[tuple[LossRule, Stage, set[int], _dist.Groups]]:
        """Yield the rules that act in a pass on all ranks, the tensors that it reaches, and the ranks.

        Ranks whose `DistributedDataParallel` a pass reaches meet: that makes all of them wait for it anyway.
        """
        reached = set(self.context.parameters.owned(leaves))
        keys = {id(leaf) for leaf in leaves}
        for stage in self.context.program.of_losses:
            rule = _loss_rule(stage)
            # Paused or not: other ranks may wait.
            if not (tensors := self._scheduled(rule, stage)):
                continue
            groups = _groups(self.context, stage.tensors, keys)
            reaches = not reached.isdisjoint(tensors)
            if self._acts(rule, tensors[0], groups, reaches=reaches, plain=plain):
                yield rule, stage, reached, groups

    def _acts(
        self, rule: LossRule, tensor: int, groups: _dist.Groups, *, reaches: bool, plain: bool
    ) -> bool:
        """Tell whether losses reach what a rule has matched on some rank, and all know them. A collective."""
        rank, paused = _dist.rank(), self.context.paused
        if groups:
            self._agreement.find_sessions_for_losses(groups)
            mine = [(rank + 1) * fact for fact in (reaches, paused, plain)]
            worst = _dist.reduce(torch.tensor(mine, device="cpu"), groups, "max").tolist()
            step = self.context.counters[tensor].step
            for other, mark, why in zip(worst[1:], (paused, plain), _RESTS, strict=True):
                if other and not mark and not self.context.paused:
                    text = why.format(rank=other - 1)
                    self.context.event_log.notice_once(
                        why, text, rule=rule.id, step=step, warn=True
                    )
            reaches, paused, plain = map(bool, worst)
        rests = paused or plain
        (self._resting.add if rests else self._resting.discard)(rule.id)
        return reaches and not rests

    def note_given(self, rule: LossRule, losses: Collection[str]) -> None:
        self._given.setdefault(rule.id, set()).update(losses)

    def never_given(self) -> Iterator[tuple[LossRule, str]]:
        """Yield the losses that no call has given, with each rule that names them and has been due."""
        for stage in self.context.program.of_losses:
            rule = _loss_rule(stage)
            given = self._given.get(rule.id, set())
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
            if _thread.named is not None:
                if rule.id not in self._resting:
                    _thread.named.reached(self, rule, due)
                continue
            name = printable(self.context.program.names[due[0]])
            step = self.context.counters[due[0]].step
            text = f"a backward pass reached {name} without the losses being known: {_HOW}"
            self.context.event_log.notice_once("plain", text, rule=rule.id, step=step, warn=True)

    def run(
        self,
        due: DueLossRule,
        given: Mapping[str, Mapping[int, Tensor | None]],
        rest: Sequence[str],
        scale: Tensor | None,
    ) -> dict[int, Tensor]:
        """Compare or combine; return the combined gradients by the ids of their parameters.

        Args:
            due: the rule.
            given: of each loss its gradients, by the ids of the parameters.
            rest: the losses that the rule does not name, to be added as they are.
            scale: what a scaler has multiplied all of them by.
        """
        rule, losses = due.rule, due.rule.losses or ()
        rows = [[given.get(name, {}).get(id(param)) for param in due.params] for name in losses]
        effect = self.effects[rule.id]
        if not isinstance(effect, Combination):
            self.record_pairs(rule, due.step, self._compared(due, effect.per, losses, rows, scale))
            return {}
        known, groups = self._products(due, rows, scale), _groups(self.context, due.tensors)
        weights = self.weights(rule, due.step, losses, known, groups)
        if weights is None or self.context.mode == "observe":
            return {}
        rows += [[given[name].get(id(param)) for param in due.params] for name in rest]
        weights += [1.0] * len(rest)
        columns = zip(due.params, zip(*rows, strict=True), strict=True)
        sums = {id(param): weighted_sum(column, weights) for param, column in columns}
        return {key: total for key, total in sums.items() if total is not None}

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
        if (culprit := _nonfinite(names, products)) is not None:
            text = f"the gradient of {printable(culprit)} is not finite: {_PLAIN}, for a trap or a scaler to see"
            event_log.notice_once(f"loss {culprit}", text, rule=rule.id, step=step)
            return None
        try:
            with _drawing(step):
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
            part = DueLossRule(self, due.rule, tensors, params)
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
        groups = _groups(self.context, due.tensors)
        average = partial(_averaged, group=groups[0]) if groups else None
        known = inner_products(rows, due.params, average, compare=compare)
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


def _nonfinite(losses: Sequence[str], products: Tensor) -> str | None:
    finite = products.diagonal().isfinite().tolist()
    return next((name for name, fine in zip(losses, finite, strict=True) if not fine), None)


def _groups(
    context: Context, tensors: Sequence[int], leaves: Collection[int] | None = None
) -> _dist.Groups:
    """Return the groups of ranks that average gradients, where a pass reaches some leaves, told by their ids."""
    if _dist.world() == 1:
        return ()
    reached = [
        wrapper
        for wrapper in context.ranks.wrappers_of(tensors)
        if leaves is None or not set(leaves).isdisjoint(map(id, wrapper.parameters()))
    ]
    return tuple(dict.fromkeys(wrapper.process_group for wrapper in reached))


def _averaged(block: Tensor, group: object) -> Tensor:
    return _dist.reduce(block, (group,)) / len(_dist.members(group))


@contextmanager
def _drawing(step: int) -> Iterator[None]:
    """Let random numbers of the host be the same on all ranks, and leave those of the script as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(step)
        yield
