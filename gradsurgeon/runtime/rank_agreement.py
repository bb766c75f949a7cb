"""All ranks make one decision on an update, by the votes that they cast at the end of a backward pass."""

import hashlib
import platform
from collections.abc import Sequence

from gradsurgeon.distributed import session_discovery
from gradsurgeon.distributed.ranks import FINE, largest
from gradsurgeon.distributed.session_discovery import Meeting, SessionInfo
from gradsurgeon.distributed.votes import Objection, Voter, VoteResult
from gradsurgeon.errors import GradSurgeonError, shorten_names
from gradsurgeon.records.shared_rows import REMEDY, UNRECORDED
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Due, Effect
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.votes_heard import ALONE, Heard, VotedPass
from gradsurgeon.tensors import _dist

_OWN_NORM = (
    "takes one norm over gradients that DDP averages and others ({name}): the clipped gradients differ by rank, and the "
    "weights drift apart; `exclude` them, or use `per: parameter`"
)
_OWN_SPIKES = (
    "rule {rule}: ranks decide by norms that all of them have, and DDP does not average the gradients of {names}: a rank "
    "that stops or skips alone leaves the others waiting. `exclude` these, or use `then: warn` or `then: clip`"
)
_ALONE = (
    "the ranks did not take the last backward pass before this update together (no DistributedDataParallel, no "
    "shards, or `no_sync`): each rank decides alone whether to stop or to skip it"
)


class RankAgreement:
    """The votes of a session on updates. In one process nothing is voted on."""

    def __init__(self, context: Context, effects: Effects) -> None:
        self._context = context
        self._effects = effects
        deciding: list[Effect] = []
        drifting: list[Effect] = []
        if context.acts:
            deciding = [effect for effect in effects.all if effect.decides]
            drifting = [effect for effect in effects.all if _lets_drift(effect)]
        on_params = [effect for effect in effects.all if effect.rule.target == "params"]
        self._decides = bool(deciding)
        # Decisions by norms that all ranks have need no vote.
        self._votes = any(effect.votes for effect in deciding)
        # In both modes ranks work together to average, and to measure and record shards.
        self._drifts = bool(drifting) or any(_averages_losses(effect) for effect in on_params)
        self._measures = any(effect.measures for effect in on_params)
        self._records = any(effect.records for effect in on_params)
        # The roll of the ranks in some groups, by the names of these groups.
        self._rolls: dict[tuple[str, ...], Meeting | None] = {}
        self._seeks = False
        self._voters: dict[tuple[str, ...], Voter] = {}
        self._voted: list[VotedPass] = []
        # The rules, with their tensors, whose norms were checked.
        self._asked: set[tuple[str, tuple[int, ...]]] = set()

    def find_sessions(self, done: BackwardPass) -> None:
        """Find the other ranks after the first pass that all of them take together. Only rules that act wait for them."""
        ranks = self._context.ranks
        if not ranks.are_several:
            return
        ranks.refuse_uneven()
        if self._measures or self._records:
            self._share_rows(ranks.shard_groups(done.indices))
        if self._decides or self._drifts:
            self.roll(self._groups(done))

    def _share_rows(self, groups: _dist.Groups) -> None:
        """Arrange that the ranks of some groups exchange their rows of shards. Rows wait for ranks without rules that act."""
        shared = self._context.recorder.shared
        if self._measures or self._decides or self._drifts:
            roll = self.roll(groups)
            if self._records and roll is not None and not shared.together:
                shared.open(roll.channel.at(f"{roll.channel.topic}/rows"))
        elif groups and not self._seeks:
            self._seeks = True
            shared.seek(self._meeting(groups).find)

    def voting(self, done: BackwardPass) -> _dist.Groups:
        """Return the groups whose ranks vote on the update after a pass."""
        if self._votes and self._context.ranks.are_several:
            return self._groups(done)
        return ()

    def cast(self, done: BackwardPass, objections: Sequence[Objection]) -> None:
        """Cast this rank's objections to the update after a pass, without waiting."""
        groups = self.voting(done)
        if not self._voted and not groups:
            return
        indices = set(done.indices)
        for earlier in self._voted:
            earlier.indices -= indices
        self._voted = [earlier for earlier in self._voted if earlier.indices]
        # A pass that raised may have come before any search for other ranks.
        names = _names(groups)
        roll = self._rolls.get(names)
        if roll is None:
            return
        if names not in self._voters:
            hosts = [session.host for session in roll.sessions.values()]
            self._voters[names] = Voter(roll.channel, hosts, _dist.patience(groups), self._warn)
        voter = self._voters[names]
        self._voted.append(VotedPass(voter, voter.cast(objections), indices))

    def heard(self, counter: StepCounter, *, is_voted_on: bool = True) -> Heard:
        """Return the votes of the ranks on an update; without them they meet if a trap trips. Waits for votes, never for updates."""
        context = self._context
        if not context.ranks.are_several:
            return ALONE
        indices = set(counter.indices)
        last = None
        for voted in self._voted:
            if not voted.indices.isdisjoint(indices):
                last = voted
        if last is None:
            return self._heard_without_votes(counter)
        if not is_voted_on:
            return Heard(last.voter, meeting=f"{last.number}/late/{counter.indices[0]}")
        decision = last.voter.decision(last.number) or VoteResult()
        unanimous = decision.unanimous
        objections = []
        for objection in decision.objections:
            index = context.index_of.get(objection.concerns)
            # A rank can have parameters that this rank lacks.
            if index is None or index in indices:
                objections.append(objection)
                if objection.severity <= FINE:
                    unanimous = False
        return Heard(last.voter, tuple(objections), unanimous)

    def _heard_without_votes(self, counter: StepCounter) -> Heard:
        """Return `ALONE` if this rank decides alone, else that the other ranks were not heard."""
        context = self._context
        if counter.passes:
            # If a rank without rules is known, an earlier notice has said so.
            if self._votes and None not in self._rolls.values():
                context.event_log.notice_once("alone", _ALONE, step=counter.step)
            return ALONE
        # A session attached after the backward pass has not heard the findings of other ranks.
        ranks = context.ranks
        if ranks.wrappers_of(counter.indices) or ranks.shard_groups(counter.indices):
            return Heard()
        return ALONE

    def close(self) -> None:
        self._voted.clear()
        self._voters.clear()
        for roll in self._rolls.values():
            if roll is not None:
                roll.channel.close()

    def _warn(self, text: str) -> None:
        self._context.event_log.emit("notice", text, warn=True)

    def check_norms(self, counter: StepCounter, due: Due) -> None:
        """Warn once per rule whose norm differs by rank; refuse a `spike-trap` that would stop by such a norm."""
        context = self._context
        if not context.ranks.is_reducing:
            return
        for bound in due.bound:
            if bound.effect.moment != "step":
                continue
            rule = bound.rule
            indices = bound.indices
            # A rule that stops or skips an update by norms at the update itself.
            judges = bound.effect.decides
            has_one_norm = rule.edits and rule.joins_norms
            is_concerned = judges or has_one_norm
            if rule.judges_losses or not is_concerned or (rule.id, indices) in self._asked:
                continue
            self._asked.add((rule.id, indices))
            own = context.names_of(context.ranks.own(indices))
            if not own:
                continue
            if judges and context.acts:
                raise GradSurgeonError(_OWN_SPIKES.format(rule=rule.id, names=shorten_names(own)))
            if has_one_norm and len(own) < len(indices):
                text = _OWN_NORM.format(name=own[0])
                log = context.event_log
                log.notice_once("own norm", text, rule=rule.id, step=counter.step, warn=True)

    def _groups(self, done: BackwardPass) -> _dist.Groups:
        """Return the groups whose ranks all took part in a pass, even ranks without a session."""
        known = self._context.ranks
        groups = (*known.shard_groups(done.indices), *known.groups_of(done.averaging, done.indices))
        return largest(tuple(dict.fromkeys(groups)))

    def roll(self, groups: _dist.Groups) -> Meeting | None:
        """Return the sessions of the ranks of some groups, if all have the same rules; ask once if unknown."""
        if not groups:
            return None
        names = _names(groups)
        if names not in self._rolls:
            self._rolls[names] = self._call(groups)
        return self._rolls[names]

    def _meeting(self, groups: _dist.Groups) -> Meeting:
        """Announce this session to the ranks of some groups."""
        context = self._context
        peers: set[int] = set()
        for group in groups:
            peers.update(_dist.members(group))
        plan = self._fingerprint(shared=self._shares(groups))
        # An update that one rank makes alone shifts only schedules.
        is_scheduled = not all(rule.steps.always for rule in context.rules)
        step = context.counters.latest if is_scheduled else 0
        members = tuple(sorted(peers))
        info = SessionInfo(plan, step, self._drifts, self._measures, platform.node(), members)
        return Meeting(groups, context.ranks.shapes(groups), info)

    def _shares(self, groups: _dist.Groups) -> bool:
        """Return whether parameters are divided over some of these groups."""
        ranks = self._context.ranks
        divided = ranks.shard_groups(range(len(self._context.names)))
        return not set(divided).isdisjoint(groups)

    def _call(self, groups: _dist.Groups) -> Meeting | None:
        """Return the roll of the sessions on the ranks of some groups; ``None`` if a rank lacks equal rules."""
        context = self._context
        devices = set()
        for param in context.parameters.present():
            devices.add(_dist.local(param).device)
        for device in devices:
            # The host may have run ahead of the ranks' common work on the device, by more than the time limit.
            _dist.synchronize(device)
        roll = self._meeting(groups)
        roll.roll(session_discovery.LIMIT)
        if not roll.lacking:
            return roll
        roll.channel.close()
        measures = self._measures
        drifts = False
        for session in roll.sessions.values():
            measures |= session.measures
            drifts |= session.drifts
        if drifts or (measures and self._shares(groups)):
            raise GradSurgeonError(
                f"{roll.lacking}: norms over shards, and gradients of single losses, would wait for ever, and weights "
                f"would drift apart if a step is skipped or a final gradient edited; {REMEDY}"
            )
        text = f"{roll.lacking}: this rank decides alone, and {UNRECORDED}"
        context.event_log.emit("notice", text, warn=True)
        return None

    def _fingerprint(self, *, shared: bool) -> str:
        """Return a hash of the mode and of the rules that all ranks must have."""
        lines: list[str] = [self._context.mode]
        for effect in self._effects.all:
            rule = effect.rule
            is_common = effect.decides or _changes(effect) or _averages_losses(effect)
            if shared and rule.target == "params":
                is_common = is_common or effect.measures or effect.records
            if is_common:
                lines.append(rule.model_dump_json() + rule.file_sha256)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _names(groups: _dist.Groups) -> tuple[str, ...]:
    return tuple(group.group_name for group in groups)


def _changes(effect: Effect) -> bool:
    return effect.rule.edits or effect.hides


def _averages_losses(effect: Effect) -> bool:
    return effect.moment == "losses" and effect.rule.target == "params"


def _lets_drift(effect: Effect) -> bool:
    """Return whether weights drift apart if some ranks lack a rule. Edits before the average reach all ranks."""
    rule = effect.rule
    if effect.then == "skip-step":
        return True
    return _changes(effect) and rule.target == "params" and rule.point == "step"
