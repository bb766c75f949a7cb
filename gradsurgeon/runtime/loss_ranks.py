"""The ranks that average the gradients of single losses: which rules act in a pass on all of them, and on what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import LossRule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.rank_agreement import RankAgreement

# The losses that no rule names, taken together. No loss has it: names of losses are not empty.
REST = ""

RESTS = (
    "rank {rank} is paused: the plain sum of the losses arrives on all ranks",
    "rank {rank} runs a plain `.backward()` where this one passes named losses: their plain sum arrives on all ranks",
)
_ALONE = (
    "DistributedDataParallel does not average this pass (`no_sync`, or one of the model that it wraps): what a rule makes "
    "of the losses follows from those of this rank alone"
)


@dataclass(frozen=True, slots=True)
class AgreedRule:
    """A rule that is to act in a pass.

    Attributes:
        tensors: those that it is to act on by its schedule.
        reached: those that the pass reaches on this rank.
        groups: the ranks that average the pass; none where this one is by itself.
        averaged: the ids of the parameters that they average.
        losses: what there is on some rank, of the losses that rules name and `REST`.
    """

    rule: LossRule
    tensors: tuple[int, ...]
    reached: frozenset[int]
    groups: _dist.Groups
    averaged: frozenset[int]
    losses: frozenset[str]


class LossRanks:
    def __init__(self, context: Context, agreement: RankAgreement) -> None:
        self._context, self._agreement = context, agreement
        self._rules = [
            (cast("LossRule", stage.rule), stage.tensors) for stage in context.program.of_losses
        ]
        # What sessions are gone through by: the same on all ranks, in whichever order they were applied.
        rules = [rule.model_dump_json() for rule, _ in self._rules]
        self.order = (*rules, *context.program.names)
        # The rules that had a rest in the last pass, because some rank has paused or runs a plain one.
        self.resting: set[str] = set()

    def agreed(
        self, leaves: Iterable[Tensor], names_given: Collection[str] | None
    ) -> Iterator[AgreedRule]:
        """Yield the rules that act in a pass on all ranks that average it. A collective where there are such.

        Args:
            leaves: what the pass reaches.
            names_given: the names of its losses, ``None`` where they have none.

        Raises:
            GradSurgeonError: a rank that averages the gradients of the parameters lacks the rules.
        """
        context, leaves = self._context, list(leaves)
        reached = frozenset(context.parameters.owned(leaves))
        keys = set(map(id, leaves))
        # Paused or not: other ranks may wait.
        due = [
            (rule, matched, tensors)
            for rule, matched in self._rules
            if (tensors := self._scheduled(rule, matched))
        ]
        names = [*dict.fromkeys(name for rule, _, _ in due for name in rule.losses or ()), REST]
        is_plain, given = names_given is None, frozenset(names_given or ())
        here = [*(name in given for name in names[:-1]), not given.issubset(names)]
        for rule, matched, tensors in due:
            groups, averaged = context.ranks.averaging(matched, keys)
            reaches = not reached.isdisjoint(tensors)
            is_alone = reaches and not groups and not given.isdisjoint(rule.losses or ())
            if is_alone and context.ranks.wrappers_of(matched):
                step = context.counters[tensors[0]].step
                context.event_log.notice_once("alone", _ALONE, rule=rule.id, step=step)
            facts = [reaches, context.paused, is_plain, *here]
            reaches, paused, plain, *there = self._joined(rule, tensors[0], groups, facts)
            rests = paused or plain
            (self.resting.add if rests else self.resting.discard)(rule.id)
            if reaches and not rests:
                losses = frozenset(n for n, is_there in zip(names, there, strict=True) if is_there)
                yield AgreedRule(rule, tensors, reached, groups, averaged, losses)

    def _scheduled(self, rule: LossRule, tensors: Sequence[int]) -> tuple[int, ...]:
        counters = self._context.counters
        return tuple(tensor for tensor in tensors if rule.steps.due(counters[tensor].step))

    def _joined(
        self, rule: LossRule, tensor: int, groups: _dist.Groups, facts: Sequence[bool]
    ) -> list[bool]:
        """Return which facts some rank has, whether it is paused or runs a plain pass among them. A collective."""
        if not groups:
            return list(facts)
        self._agreement.find_sessions_for_losses(groups)
        rank = _dist.rank()
        mine = torch.tensor([(rank + 1) * fact for fact in facts], device="cpu")
        largest = _dist.reduce(mine, groups, "max").tolist()
        for other, fact, why in zip(largest[1:3], facts[1:3], RESTS, strict=True):
            if other and not fact and not self._context.paused:
                step, text = self._context.counters[tensor].step, why.format(rank=other - 1)
                log = self._context.event_log
                log.notice_once(why, text, rule=rule.id, step=step, warn=True)
        return list(map(bool, largest))
