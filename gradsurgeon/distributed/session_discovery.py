"""The ranks find each other's rules and sessions before their first common decision.

A collective would wait for ever for a rank without a session (`if rank == 0: apply(...)`). The ranks therefore
meet in the key-value store of the job. The first rank that closes the roll closes it for all.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gradsurgeon.actions import Rule
from gradsurgeon.language.planning import Manifest, Plan, is_for, shortfalls
from gradsurgeon.language.schema import RuleSet
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors._channel import Channel, numbered

# Seconds. Ranks that have just reduced a gradient together reach their update at nearly the same time.
# A rank that is not waited for must not lose patience with its own next collective.
LIMIT = 10.0

_CLOSED = "met/closed"

_OTHER_NUMBER = "matches another number of parameters than `expect` says"

# The names that this rank has matched so far, by the rules: a script may apply the same rules to several
# models.
_matched = defaultdict[str, dict[str, set[str]]](partial(defaultdict, set))


class SessionInfo(NamedTuple):
    # A hash of the acting rules and the mode.
    plan: str
    step: int
    # Whether weights differ between ranks if some lack these rules.
    drifts: bool
    # Whether rules measure whole gradients of sharded parameters.
    measures: bool
    host: str
    # The ranks of all groups with which the session shares gradients.
    peers: tuple[int, ...]


class Meeting:
    """A session on its way to the sessions of the ranks of some groups, for the model with these shapes.

    Attributes:
        channel: a channel of these sessions.
        sessions: the sessions that came in time, by rank; alike on all ranks. Known after `roll`.
        lacking: which ranks did not come or have other rules.
    """

    sessions: dict[int, SessionInfo]
    lacking: str

    def __init__(
        self, groups: _dist.Groups, shapes: Sequence[tuple[int, ...]], info: SessionInfo
    ) -> None:
        kind = hashlib.sha256(repr(list(shapes)).encode()).hexdigest()[:16]
        name = ""
        if len(groups) == 1:
            # Each rank of a mesh belongs to other groups, so several groups have no common name.
            name = groups[0].group_name
        self._topic = f"sessions/{name}/{kind}"
        self._info = info
        self._enter(Channel(numbered(self._topic)))

    def _enter(self, channel: Channel) -> None:
        self.channel = channel
        channel.ranks = (channel.rank,)
        # The rest of the session goes on without a store that has failed.
        with suppress(RuntimeError):
            channel.set(f"met/{channel.rank}", self._info)

    def roll(self, limit: float) -> bool:
        """Find the sessions that come within some seconds. With a limit of 0, return whether all have come."""
        try:
            while True:
                peers = self._peers(limit)
                if peers is None:
                    return False
                here = self.channel.present("met", peers, 0.0)
                closed = self.channel.agree(_CLOSED, here)
                if self.channel.rank in closed:
                    sessions = {rank: self.channel.get(f"met/{rank}") for rank in closed}
                    break
                # A roll that was closed earlier belonged to another session: other ranks have had one more.
                self._leave()
                self._enter(self.channel.at(numbered(self._topic)))
        except RuntimeError:  # the store has failed
            sessions = {self.channel.rank: self._info}
            peers = set(self._info.peers)
        self._note(sessions, peers)
        return True

    def _peers(self, limit: float) -> set[int] | None:
        """Return the ranks that share gradients, also through others. With a limit of 0 all of them must have come."""
        peers = set[int]()
        more = set(self._info.peers)
        while not more <= peers:
            peers |= more
            if not limit and not self.channel.is_met("met", peers):
                return None
            more = set()
            for rank in self.channel.present("met", peers, limit):
                more.update(self.channel.get(f"met/{rank}").peers)
        return peers

    def _note(self, sessions: dict[int, SessionInfo], wanted: set[int]) -> None:
        channel = self.channel
        channel.ranks = tuple(sessions)
        others = []
        for rank, session in sessions.items():
            # The rank that closed the roll may have known more peers.
            wanted.update(session.peers)
            if (session.plan, session.step) != (self._info.plan, self._info.step):
                others.append(rank)
        lacking = []
        absent = sorted(wanted.difference(sessions))
        if absent:
            # They may come later, and must not take another session for this one.
            channel.keep(_CLOSED)
            lacking.append(unheard(absent))
        if others:
            having = _dist.having(others)
            lacking.append(f"{having} other rules, mode or step than rank {channel.rank}")
        self.sessions = sessions
        self.lacking = " and ".join(lacking)

    def find(self, limit: float | None) -> Channel | str | None:
        """Return a channel of the sessions or which of them are missing, ``None`` if not all come within some seconds.

        Without a limit, close the roll without this session, which later sessions must not take for theirs.
        """
        if limit is None:
            here = [self.channel.rank]
            with suppress(RuntimeError):
                self.channel.agree(_CLOSED, [])
                here = self.channel.present("met", self._info.peers, 0.0)
            self._leave()
            absent = sorted(set(self._info.peers).difference(here))
            return f"nothing heard of rules on {_dist.named(absent)}"
        if not self.roll(limit):
            return None
        if self.lacking:
            self.channel.close()
            return self.lacking
        return self.channel

    def _leave(self) -> None:
        self.channel.keep(_CLOSED)
        self.channel.close()


def unheard(ranks: Sequence[int]) -> str:
    return f"nothing heard of rules on {_dist.named(ranks)} within {LIMIT:g} s"


def _note_matches(rules: RuleSet, plans: Mapping[str, Plan]) -> dict[str, set[str]]:
    """Return the names that rules have matched on this rank so far, by rule."""
    mine = _matched[rules.sha256]
    for rule in rules.rules:
        # Only rules with `expect` need the number of names; for other rules one name is enough.
        most = None if rule.expect else 1
        for plan in plans.values():
            names = [binding.name for binding in plan.of(rule.id)]
            mine[rule.id].update(names[:most])
    return mine


def _rules_to_ask_about(
    rules: RuleSet, models: Mapping[str, Manifest], *, alone: bool
) -> Iterator[tuple[Rule, list[str]]]:
    """Yield rules that may match names on other ranks only, or that count them, with their errors on this rank."""
    for rule in rules.rules:
        errors = shortfalls(replace(rules, rules=(rule,)), models)
        is_for_others = False
        if alone and rule.model:
            is_for_others = not any(is_for(rule, manifest) for manifest in models.values())
        if (errors or rule.expect) and not is_for_others:
            yield rule, errors


def lacking(
    rules: RuleSet, plans: Mapping[str, Plan], *, alone: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the errors of rules that match too little on all ranks, and notes on rules that match only on others.

    With ``alone`` a rule for models of another class may match nothing.
    """
    models = {title: plan.manifest for title, plan in plans.items()}
    if _dist.world() == 1:
        return shortfalls(rules, models), {}
    channel = Channel(f"matched/{rules.sha256}")
    mine = _note_matches(rules, plans)
    # A store that has failed must not end the script: no other rank can be asked then.
    with suppress(RuntimeError):
        channel.set(f"names/{channel.rank}", mine)
    asked = list(_rules_to_ask_about(rules, models, alone=alone))
    if not asked:
        return [], {}
    # Without the store this rank knows only its own names.
    matched = {channel.rank: mine}
    ranks = range(_dist.world())
    with suppress(RuntimeError):
        here = channel.present("names", ranks, LIMIT)
        matched = {rank: channel.get(f"names/{rank}") for rank in here}
    absent = [rank for rank in ranks if rank not in matched]
    silent = f"; {unheard(absent)}" if absent else ""
    errors = []
    notes = {}
    for rule, short in asked:
        by_rank = {rank: names[rule.id] for rank, names in matched.items() if names.get(rule.id)}
        count = len(set().union(*by_rank.values()))
        is_missing = not by_rank and not rule.optional
        if is_missing or (rule.expect and rule.expect.params != count):
            texts = short or [f"{rules.place(rule.id)}: rule {rule.id}: {_OTHER_NUMBER}"]
            errors += [f"{text} (on all ranks together: {count}{silent})" for text in texts]
        elif by_rank and channel.rank not in by_rank:
            where = f"matches nothing on rank {channel.rank}"
            notes[rule.id] = f"{where}; {_dist.having([*by_rank])} it"
    return errors, notes
