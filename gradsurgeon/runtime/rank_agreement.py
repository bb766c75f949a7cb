"""One decision of all ranks on an update, where the ranks meet anyway.

What one rank has seen by itself is put to all of them: gradients that were reduced are as a rule alike
everywhere, but a parameter that DDP leaves alone, a communication hook or the script itself can make
them differ, and a rank that stops or skips alone leaves the others waiting. None meets the others over
what it alone has seen: rules, their schedules and the backward pass before the update say when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from gradsurgeon import _dist
from gradsurgeon.actions import FreezeRule, LossRule, Rule, TrapRule
from gradsurgeon.distributed import ranks, session_discovery
from gradsurgeon.distributed.ranks import FINE, Cause
from gradsurgeon.distributed.session_discovery import SessionInfo
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.step_counter import StepCounter

_OWN_NORM = (
    "takes one norm over gradients that DDP averages and others that it leaves alone ({name}): unless the script "
    "averages those, the norm and what it leaves of the gradients differ by rank, and the weights drift apart; "
    "`exclude` them, or use `per: parameter`"
)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the ranks have come to, or one that is on its own."""

    # The largest of all, and the first rank that has it.
    severity: int
    source: int
    # The ranks that contributed what is not finite to an average.
    guilty: tuple[int, ...] = ()
    # Over which they met; none where this rank decides alone.
    groups: _dist.Groups = ()

    def hear(self, cause: Cause) -> Cause:
        """Return on all ranks what the first of the worst off has to say. A collective."""
        return cast("Cause", _dist.broadcast(cause, self.source, self.groups))


class RankAgreement:
    def __init__(self, context: Context) -> None:
        self._context = context
        acting = context.rules if context.mode == "act" else ()
        self._deciding = [rule for rule in acting if _decides(rule)]
        self._edits = any(map(_edits_updates, acting))
        # In both modes: ranks average what single losses give.
        self._drifts = (
            self._edits
            or any(_then(rule) == "skip-step" for rule in acting)
            or any(map(_averages_losses, context.rules))
        )
        # What is divided over ranks can be measured by all of them together only.
        self._measures = any(rule.target == "params" for rule in context.rules)
        # By the name of a group: whether all of its ranks have the session's rules.
        self._complete: dict[str, bool] = {}
        # The rules, with their tensors, that have been asked for what their norms are over.
        self._asked: set[tuple[str, tuple[int, ...]]] = set()

    def find_sessions(self, tensors: Sequence[int], *, update: bool) -> None:
        """Find the other ranks, before the first measure or update that they take together."""
        if self._measures:
            self._with_rules(self._context.ranks.shard_groups(tensors))
        if update and (self._deciding or self._drifts):
            self._with_rules(self._context.ranks.reduction_groups(tensors))

    def find_sessions_for_losses(self, groups: _dist.Groups) -> None:
        """Find the other ranks before the first gradients of single losses that they average together."""
        self._with_rules(groups)

    def is_needed_by_others(self, tensors: Sequence[int], *, update: bool) -> bool:
        """Tell whether other ranks cannot measure what is divided over all without this paused one."""
        # Before an update all rest if one does that has to edit.
        if not (self._context.paused and self._measures) or (update and self._edits):
            return False
        return bool(self._with_rules(self._context.ranks.shard_groups(tensors)))

    def is_paused_anywhere(self, tensors: Sequence[int]) -> bool:
        """Tell whether the rules are to rest in a step. A collective where an edit is divided over ranks."""
        context = self._context
        # A pause on one rank is a pause on all that have a part of what is edited: half a clip is none.
        groups = self._with_rules(context.ranks.shard_groups(tensors)) if self._edits else ()
        if not groups:
            return context.paused
        resting, rank = ranks.worst(int(context.paused), groups)
        if resting and not context.paused:
            text = f"rank {rank} is paused and has a part of what the rules would edit: they rest here as well"
            context.event_log.notice_once("paused", text, step=context.counters.latest, warn=True)
        return bool(resting)

    def meet(self, counter: StepCounter, severity: int, *, guilty: bool) -> Meeting:
        """Let all ranks learn how the worst off of them is. A collective where they meet."""
        alone = Meeting(severity, _dist.rank(), (_dist.rank(),) if guilty else ())
        # Not by what a rule has matched: ranks may have different parts of the model.
        due = any(rule.steps.due(counter.step) for rule in self._deciding)
        if not due or _dist.world() == 1:
            return alone
        common = self.common(counter)
        if not common:
            text = (
                "the ranks have reduced no gradient of this update together (no DistributedDataParallel, no "
                "shards, or `no_sync`): each rank decides alone whether to stop or to skip it"
            )
            self._context.event_log.notice_once("alone", text, step=counter.step)
        groups = self._with_rules(common)
        if not groups:
            return alone
        worst, source = ranks.worst(severity, groups)
        if worst == FINE:
            return replace(alone, groups=groups)
        return Meeting(worst, source, ranks.who(guilty, groups), groups)

    def warn_of_own_norms(self, counter: StepCounter) -> None:
        """Say once of which rules one norm differs by rank, and with it what is left of gradients alike."""
        context = self._context
        averaged = context.ranks.averaged() if self._edits else frozenset()
        for bound in context.due_rules(counter).at_step if averaged else ():
            rule, tensors = bound.rule, bound.tensors
            if getattr(rule, "per", "") != "rule" or (rule.id, tensors) in self._asked:
                continue
            self._asked.add((rule.id, tensors))
            params = zip(tensors, context.parameters.params(tensors), strict=True)
            own = [
                tensor
                for tensor, param in params
                if param is not None
                and param.requires_grad
                and id(param) not in averaged
                and not _dist.is_divided(param)
            ]
            if own and len(own) < len(tensors):
                text = _OWN_NORM.format(name=context.program.names[own[0]])
                where: dict[str, Any] = {"rule": rule.id, "step": counter.step, "warn": True}
                context.event_log.notice_once("own norm", text, **where)

    def common(self, counter: StepCounter) -> _dist.Groups:
        """Return the groups whose ranks all have a part in an update, with a session or without."""
        known = self._context.ranks
        groups = (*known.shard_groups(counter.tensors), *known.reduction_groups(counter.tensors))
        return tuple(dict.fromkeys(groups))

    def _with_rules(self, groups: _dist.Groups) -> _dist.Groups:
        """Return those of some groups of which all ranks have the rules; ask where it is not known."""
        for group in groups:
            if group.group_name not in self._complete:
                self._complete[group.group_name] = self._call(group)
        return tuple(group for group in groups if self._complete[group.group_name])

    def _call(self, group: Any) -> bool:
        context = self._context
        params = [param for param in context.parameters.params() if param is not None]
        for device in {_dist.local(param).device for param in params}:
            # The host may have run ahead of what the ranks do together, by more than the limit.
            _dist.settle(device)
        shared = self._measures and group in context.ranks.shard_groups(range(len(params)))
        info = SessionInfo(self._fingerprint(shared=shared), context.counters.latest, self._drifts)
        answers = session_discovery.call(group, context.ranks.shapes(group), info)
        lacking = _lacking(_dist.members(group), answers, info)
        if not lacking:
            return True
        remedy = "apply the same rules on all ranks, with the same `mode` and `start_step`"
        if shared or any(answer.drifts for answer in answers.values()):
            raise GradSurgeonError(
                f"{lacking}: norms of a model that is divided over ranks, and gradients of single losses, would wait for "
                f"ever, and weights would drift apart where a step is skipped or a final gradient edited; {remedy}"
            )
        text = f"{lacking}: this rank decides alone, and where it stops the others wait for it; {remedy}"
        context.event_log.emit("notice", text, step=context.counters.latest, warn=True)
        return False

    def _fingerprint(self, *, shared: bool) -> str:
        """Return what tells the rules that all ranks must have, and the mode, from others."""
        rules = [
            rule.model_dump_json()
            for rule in self._context.rules
            if _decides(rule)
            or _changes(rule)
            or _averages_losses(rule)
            or (shared and rule.target == "params")
        ]
        return hashlib.sha256("\n".join([self._context.mode, *rules]).encode()).hexdigest()


def _changes(rule: Rule) -> bool:
    return rule.edits or isinstance(rule, FreezeRule)


def _averages_losses(rule: Rule) -> bool:
    return isinstance(rule, LossRule) and rule.target == "params"


def _decides(rule: Rule) -> bool:
    return _then(rule) in ("raise", "skip-step")


def _then(rule: Rule) -> str:
    return rule.then if isinstance(rule, TrapRule) else ""


def _edits_updates(rule: Rule) -> bool:
    """Tell whether weights differ where some ranks lack a rule: all get what changes before the average."""
    return _changes(rule) and rule.target == "params" and rule.point == "step"


def _lacking(wanted: Sequence[int], answers: Mapping[int, SessionInfo], info: SessionInfo) -> str:
    parts = []
    if absent := [rank for rank in wanted if rank not in answers]:
        parts.append(session_discovery.unheard(absent))
    if others := [rank for rank, answer in answers.items() if answer[:2] != info[:2]]:
        parts.append(f"{_dist.having(others)} other rules, mode or step than rank {_dist.rank()}")
    return " and ".join(parts)
