"""The ranks find each other's rules and sessions before their first common decision.

A collective would wait for ever for a rank without a session (`if rank == 0: apply(...)`). The ranks therefore
meet in the key-value store of the job. The first rank that closes the roll closes it for all.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from gradsurgeon.language.planning import Plan, is_for, shortfalls
from gradsurgeon.language.schema import RuleSet
from gradsurgeon.tensors import _dist, _job_store

# Seconds. Ranks that have just reduced a gradient together reach their update at nearly the same time.
# A rank that is not waited for must not lose patience with its own next collective.
LIMIT = 10.0

# How often sessions with the same shapes have met on a group. The first meeting of a session is the next of
# these meetings on all ranks, in whichever order the sessions were applied. A count never goes back,
# even if the groups are gone.
_met: Counter[str] = Counter()

# The key that closes a roll.
_CLOSED = "closed"

Names = dict[str, list[str]]

# The names that this rank has matched so far, by the rules: a script may apply the same rules to several
# models.
_matched: dict[str, Names] = {}


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


class Roll(NamedTuple):
    """The sessions that train one model together.

    Attributes:
        prefix: a prefix of keys in the store of the job that no other sessions use.
        wanted: the ranks that should have a session: peers, their peers, and so on.
        sessions: the sessions that came in time, by rank; alike on all ranks.
    """

    prefix: str
    wanted: tuple[int, ...]
    sessions: dict[int, SessionInfo]


class Meeting:
    """A session on its way to the sessions of the ranks of some groups, for the model with these shapes."""

    def __init__(
        self, groups: _dist.Groups, shapes: Sequence[tuple[int, ...]], info: SessionInfo
    ) -> None:
        kind = hashlib.sha256(repr(list(shapes)).encode()).hexdigest()[:16]
        # The ranks of a mesh belong to different groups each.
        name = groups[0].group_name if len(groups) == 1 else ""
        self._topic = f"{_job_store.attempt()}/roll/{name}/{kind}"
        # The process group may be gone when the meeting ends.
        self._rank = _dist.rank()
        self.info = info
        self.store = _job_store.OwnStore(self._topic)
        self._enter()

    def _enter(self) -> None:
        self._prefix = f"{self._topic}/{_met[self._topic]}"
        _met[self._topic] += 1
        self.store = self.store.at(self._prefix)
        # The rest of the session goes on without a store that has failed.
        with suppress(RuntimeError):
            self.store.set(str(self._rank), json.dumps(self.info))

    def roll(self, limit: float) -> Roll | None:
        """Return the sessions that come within some seconds. With a limit of 0, return ``None`` until all have come."""
        try:
            return self._roll(limit)
        except RuntimeError:
            own = {self._rank: self.info}
            return Roll(f"{self._prefix}/votes", self.info.peers, own)

    def _roll(self, limit: float) -> Roll | None:
        while True:
            if not (limit or self._has_met(self.info.peers)):
                return None
            wanted, here = self._peers(limit)
            if not (limit or self._has_met(wanted)):
                return None
            closed = json.loads(self.store.compare_set(_CLOSED, "", json.dumps(here)))
            # A roll that was closed earlier belonged to another session: other ranks have had one more.
            if self._rank in closed:
                sessions = {rank: self._session(rank) for rank in closed}
                # The rank that closed the roll may have known more peers.
                peers = {rank for session in sessions.values() for rank in session.peers}
                return Roll(f"{self._prefix}/votes", tuple(sorted({*wanted, *peers})), sessions)
            self._enter()

    def _peers(self, limit: float) -> tuple[set[int], list[int]]:
        """Return the ranks that share gradients, also through others, and the ranks that came."""
        wanted: set[int] = set()
        here = list[int]()
        more = set(self.info.peers)
        while not more <= wanted:
            wanted |= more
            here = _job_store.present(self.store, wanted, limit, until=_CLOSED)
            more = {rank for one in here for rank in self._session(one).peers}
        return wanted, here

    def _session(self, rank: int) -> SessionInfo:
        return SessionInfo(*json.loads(self.store.get(str(rank))))

    def _has_met(self, ranks: Iterable[int]) -> bool:
        """Tell whether some ranks have come, or another rank has closed the roll."""
        return self.store.check(list(map(str, ranks))) or self.store.check([_CLOSED])

    def leave(self) -> list[int]:
        """Close the roll without this session, which later sessions must not take for theirs; return the missing ranks."""
        here = [self._rank]
        with suppress(RuntimeError):
            self.store.compare_set(_CLOSED, "", "[]")
            here = _job_store.present(self.store, self.info.peers, 0.0)
        return [rank for rank in self.info.peers if rank not in here]


def unheard(ranks: Sequence[int]) -> str:
    return f"nothing heard of rules on {_dist.named(ranks)} within {LIMIT:g} s"


def lacking(
    rules: RuleSet, plans: Mapping[str, Plan], *, alone: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the errors of rules that match too little on all ranks, and notes on rules that match only on others.

    With ``alone`` a rule for models of another class may match nothing.
    """
    models = {title: plan.manifest for title, plan in plans.items()}
    if _dist.world() == 1:
        return shortfalls(rules, models), {}
    store = _job_store.OwnStore(f"{_job_store.attempt()}/matched/{rules.sha256}")
    mine = _matched.setdefault(rules.sha256, {})
    for plan in plans.values():
        for rule in rules.rules:
            names = [binding.name for binding in plan.of(rule.id)]
            # Only rules with `expect` need the number of names; for other rules one name is enough.
            mine[rule.id] = sorted({*mine.get(rule.id, ()), *(names if rule.expect else names[:1])})
    # A store that has failed must not end the script: no other rank can be asked then.
    with suppress(RuntimeError):
        store.set(str(_dist.rank()), json.dumps(mine))
    asked = [
        rule
        for rule in rules.rules
        if rule.expect or shortfalls(_only(rules, rule.id), models)
        if not (alone and rule.model) or any(is_for(rule, manifest) for manifest in models.values())
    ]
    if not asked:
        return [], {}
    matched: dict[int, Names] = {_dist.rank(): mine}
    every = range(_dist.world())
    with suppress(RuntimeError):
        here = _job_store.present(store, every, LIMIT)
        matched = {rank: json.loads(store.get(str(rank))) for rank in here}
    absent = [rank for rank in every if rank not in matched]
    errors: list[str] = []
    notes: dict[str, str] = {}
    for rule in asked:
        having = [rank for rank, names in matched.items() if names.get(rule.id)]
        count = len({name for names in matched.values() for name in names.get(rule.id, ())})
        enough = bool(having) or rule.optional
        if not enough or (rule.expect is not None and rule.expect.params != count):
            silent = f"; {unheard(absent)}" if absent else ""
            texts = shortfalls(_only(rules, rule.id), models) or [
                f"{rules.place(rule.id)}: rule {rule.id}: matches another number of parameters than "
                "`expect` says"
            ]
            errors += [f"{text} (on all ranks together: {count}{silent})" for text in texts]
        elif having and not mine.get(rule.id):
            where = f"matches nothing on rank {_dist.rank()}"
            notes[rule.id] = f"{where}; {_dist.having(having)} it"
    return errors, notes


def _only(rules: RuleSet, rule_id: str) -> RuleSet:
    return replace(rules, rules=tuple(rule for rule in rules.rules if rule.id == rule_id))
