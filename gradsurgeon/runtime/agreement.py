"""One decision of all ranks on an update, where the ranks meet anyway.

What one rank has seen by itself is put to all of them: gradients that were reduced are as a rule alike
everywhere, but a parameter that DDP leaves alone, a communication hook or the script itself can make
them differ, and a rank that stops or skips alone leaves the others waiting. None meets the others over
what it alone has seen: rules, their schedules and the backward pass before the update say when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradsurgeon import _dist
from gradsurgeon.actions import EditRule, FreezeRule, Rule
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime import ranks, rollcall
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.ranks import Word
from gradsurgeon.runtime.rollcall import Answer, Roll
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.verdict import FINE, then_of


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the ranks have come to, or one that is on its own.

    Attributes:
        severity: the largest of all.
        source: the first rank that has it.
        guilty: the ranks that contributed what is not finite to an average.
        groups: over which they met; none where this rank decides alone.
    """

    severity: int
    source: int
    guilty: tuple[int, ...] = ()
    groups: _dist.Groups = ()

    def hear(self, word: Word) -> Word:
        """Return on all ranks what the first of the worst off has to say. A collective."""
        heard: Word = _dist.broadcast(word, self.source, self.groups)
        return heard


class Agreement:
    """What a session has to do with those of other ranks."""

    def __init__(self, state: State) -> None:
        self._state = state
        acting = state.rules if state.mode == "act" else ()
        self._deciding = [rule for rule in acting if _decides(rule)]
        self._edits = any(map(_edits_updates, acting))
        self._drifts = self._edits or any(then_of(rule) == "skip-step" for rule in acting)
        # What is divided over ranks can be measured by all of them together only.
        self._measures = any(rule.target == "params" for rule in state.rules)
        # By the name of a group: whether all of its ranks have the session's rules.
        self._complete: dict[str, bool] = {}
        self._refused = ""

    def gather(self, tensors: Sequence[int], *, update: bool) -> None:
        """Find the other ranks, before the first measure or update that they take together.

        Raises:
            GradSurgeonError: they do not have the rules, and this one cannot go on without.
        """
        if self._measures:
            self._with_rules(self._state.ranks.sharing(tensors))
        if update and (self._deciding or self._drifts):
            self._with_rules(self._state.ranks.reducing(tensors))

    def is_missed(self, tensors: Sequence[int], *, update: bool) -> bool:
        """Tell whether other ranks cannot measure what is divided over all without this paused one."""
        # Before an update all rest if one does that has to edit.
        if not (self._state.paused and self._measures) or (update and self._edits):
            return False
        return bool(self._with_rules(self._state.ranks.sharing(tensors)))

    def rests(self, tensors: Sequence[int]) -> bool:
        """Tell whether the rules are to rest in a step.

        A pause on one rank is a pause on all that have a part of what a rule would edit: half a clip is
        none. A collective there.
        """
        state = self._state
        groups = self._with_rules(state.ranks.sharing(tensors)) if self._edits else ()
        if not groups:
            return state.paused
        resting, rank = ranks.worst(int(state.paused), groups)
        if resting and not state.paused:
            text = (
                f"rank {rank} is paused and has a part of what the rules would edit, so that they rest on "
                "this rank as well"
            )
            state.journal.once("paused", text, step=state.clocks.latest, warn=True)
        return bool(resting)

    def meet(self, clock: Clock, severity: int, *, guilty: bool) -> Meeting:
        """Let all ranks learn how the worst off of them is. A collective where they meet.

        A rank is guilty that contributed what is not finite to an average.
        """
        alone = Meeting(severity, _dist.rank(), (_dist.rank(),) if guilty else ())
        # Not by what a rule has matched: ranks may have different parts of the model.
        due = any(rule.steps.due(clock.step) for rule in self._deciding)
        if not due or _dist.world() == 1:
            return alone
        common = self.common(clock)
        if not common:
            self._mention_none(clock)
        groups = self._with_rules(common)
        if not groups:
            return alone
        worst, source = ranks.worst(severity, groups)
        if worst == FINE:
            return replace(alone, groups=groups)
        return Meeting(worst, source, ranks.who(guilty, groups), groups)

    def common(self, clock: Clock) -> _dist.Groups:
        """Return the groups whose ranks all have a part in an update, with a session or without."""
        known = self._state.ranks
        groups = (*known.sharing(clock.tensors), *known.reducing(clock.tensors))
        return tuple(dict.fromkeys(groups))

    def _with_rules(self, groups: _dist.Groups) -> _dist.Groups:
        """Return those of some groups of which all ranks have the rules; ask where it is not known."""
        if self._refused:
            raise GradSurgeonError(self._refused)
        for group in groups:
            if group.group_name not in self._complete:
                self._complete[group.group_name] = self._call(group)
        return tuple(group for group in groups if self._complete[group.group_name])

    def _call(self, group: Any) -> bool:
        state = self._state
        params = [param for param in state.targets.params() if param is not None]
        for device in {_dist.local(param).device for param in params}:
            # The host may have run ahead of what the ranks do together, by more than the limit.
            _dist.settle(device)
        shared = self._measures and group in state.ranks.sharing(range(len(params)))
        mine = Answer(self._fingerprint(shared=shared), state.clocks.latest, self._drifts)
        roll = rollcall.call(group, state.ranks.shapes(group), mine)
        if not (roll.absent or roll.others(mine)):
            return True
        lacking = _lacking(roll, mine)
        if shared or roll.drifts:
            self._refused = f"{lacking}; {_SHARED if shared else _DRIFTING}"
            raise GradSurgeonError(self._refused)
        text = (
            f"{lacking}: this rank decides alone, and where it stops the others wait for it; "
            "apply the same rules on all ranks"
        )
        state.journal.emit("notice", text, step=state.clocks.latest, warn=True)
        return False

    def _fingerprint(self, *, shared: bool) -> str:
        """Return what tells the rules that all ranks must have, and the mode, from others."""
        rules = [
            rule.model_dump_json()
            for rule in self._state.rules
            if _decides(rule) or isinstance(rule, _CHANGING) or (shared and rule.target == "params")
        ]
        return hashlib.sha256("\n".join([self._state.mode, *rules]).encode()).hexdigest()

    def _mention_none(self, clock: Clock) -> None:
        unreduced = self._state.ranks.reducing(clock.tensors, any_pass=True)
        if unreduced:
            why = "the last backward pass before this update reduced nothing over ranks (`no_sync`)"
        else:
            why = (
                "the ranks have no process group in common for these parameters (no "
                "DistributedDataParallel around them, and they are not sharded)"
            )
        text = f"{why}: each rank decides alone whether to stop or to skip it"
        self._state.journal.once("alone in a step" if unreduced else "alone", text, step=clock.step)


_CHANGING = (EditRule, FreezeRule)


def _decides(rule: Rule) -> bool:
    return then_of(rule) in ("raise", "skip-step")


def _edits_updates(rule: Rule) -> bool:
    """Tell whether weights come to differ where only some ranks have a rule.

    What a rule changes before gradients are averaged, all ranks get.
    """
    return isinstance(rule, _CHANGING) and rule.target == "params" and rule.point == "step"


def _lacking(roll: Roll, mine: Answer) -> str:
    me = _dist.rank()
    if me in roll.absent:
        rest = _dist.named([rank for rank in roll.wanted if rank != me])
        return f"rank {me} has come with its rules after {rest} had begun to train without it"
    parts = []
    if roll.absent:
        limit = f"nothing heard within {rollcall.LIMIT:g} s"
        parts.append(f"{_dist.having(roll.absent)} no rules ({limit})")
    if others := roll.others(mine):
        parts.append(f"{_dist.having(others)} other rules, mode or step than rank {me}")
    return " and ".join(parts)


_SHARED = (
    "the model is divided over these ranks, so that its norms can be taken by all of them together "
    "only: apply the same rules on all ranks, with the same `mode` and `start_step`"
)
_DRIFTING = (
    "a rule that skips a step or edits final gradients would let the weights of the ranks drift apart: "
    "apply the same rules on all ranks, with the same `mode` and `start_step`"
)
