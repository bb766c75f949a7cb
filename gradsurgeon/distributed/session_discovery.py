"""The ranks find each other's rules and sessions before their first common decision.

A collective would wait for ever for a rank without a session (`if rank == 0: apply(...)`). The ranks therefore
meet in the key-value store of the job. The first rank that closes the roll closes it for all.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gradsurgeon import _dist
from gradsurgeon.planning import Plan, is_for, shortfalls
from gradsurgeon.schema import RuleSet

# Seconds. Ranks that have just reduced a gradient together reach their update at nearly the same time.
# A rank that is not waited for must not lose patience with its own next collective.
LIMIT = 10.0

# How often sessions with the same shapes have met on a group. The first meeting of a session is the next of
# these meetings on all ranks, in whichever order the sessions were applied. A count never goes back,
# even if the groups are gone.
_met: Counter[str] = Counter()

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


def call(groups: _dist.Groups, shapes: Sequence[tuple[int, ...]], info: SessionInfo) -> Roll:
    """Return the sessions of the ranks of some groups, for the model with these shapes, that come in time."""
    kind = hashlib.sha256(repr(list(shapes)).encode()).hexdigest()[:16]
    # The ranks of a mesh belong to different groups each.
    name = groups[0].group_name if len(groups) == 1 else ""
    topic = f"{_dist.attempt()}/roll/{name}/{kind}"
    while True:
        prefix = f"{topic}/{_met[topic]}"
        _met[topic] += 1
        _publish(prefix, info)
        wanted, here = _peers(prefix, info)
        closed = json.loads(_dist.store().compare_set(f"{prefix}/closed", "", json.dumps(here)))
        # A roll that was closed earlier belonged to another session: other ranks have had one more.
        if _dist.rank() in closed:
            sessions = {rank: SessionInfo(*_published(prefix, rank)) for rank in closed}
            # The rank that closed the roll may have known more peers.
            peers = {rank for session in sessions.values() for rank in session.peers}
            return Roll(f"{prefix}/votes", tuple(sorted({*wanted, *peers})), sessions)


def _peers(prefix: str, info: SessionInfo) -> tuple[set[int], list[int]]:
    """Return the ranks that share gradients, also through others, and the ranks that came."""
    wanted: set[int] = set()
    here, more = list[int](), set(info.peers)
    while not more <= wanted:
        wanted |= more
        here = _dist.present(_dist.store(), prefix, wanted, LIMIT, f"{prefix}/closed")
        more = {rank for one in here for rank in SessionInfo(*_published(prefix, one)).peers}
    return wanted, here


def _publish(prefix: str, value: Any) -> None:
    _dist.store().set(f"{prefix}/{_dist.rank()}", json.dumps(value))


def _published(prefix: str, rank: int) -> Any:
    return json.loads(_dist.store().get(f"{prefix}/{rank}"))


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
    prefix = f"{_dist.attempt()}/matched/{rules.sha256}"
    mine = _matched.setdefault(rules.sha256, {})
    for plan in plans.values():
        for rule in rules.rules:
            names = [binding.name for binding in plan.of(rule.id)]
            # Only rules with `expect` need the number of names; for other rules one name is enough.
            mine[rule.id] = sorted({*mine.get(rule.id, ()), *(names if rule.expect else names[:1])})
    _publish(prefix, mine)
    asked = [
        rule
        for rule in rules.rules
        if rule.expect or shortfalls(_only(rules, rule.id), models)
        if not (alone and rule.model) or any(is_for(rule, manifest) for manifest in models.values())
    ]
    if not asked:
        return [], {}
    every = range(_dist.world())
    here = _dist.present(_dist.store(), prefix, every, LIMIT)
    matched: dict[int, Names] = {rank: _published(prefix, rank) for rank in here}
    absent = [rank for rank in every if rank not in matched]
    errors: list[str] = []
    notes: dict[str, str] = {}
    for rule in asked:
        having = [rank for rank, names in matched.items() if names.get(rule.id)]
        count = len({name for names in matched.values() for name in names.get(rule.id, ())})
        enough = bool(having) or rule.optional
        if not enough or (rule.expect is not None and rule.expect.params != count):
            heard = f"; {unheard(absent)}" if absent else ""
            texts = shortfalls(_only(rules, rule.id), models) or [
                f"{rules.place(rule.id)}: rule {rule.id}: matches another number of parameters than "
                "`expect` says"
            ]
            errors += [f"{text} (on all ranks together: {count}{heard})" for text in texts]
        elif having and not mine.get(rule.id):
            where = f"matches nothing on rank {_dist.rank()}"
            notes[rule.id] = f"{where}; {_dist.having(having)} it"
    return errors, notes


def _only(rules: RuleSet, rule_id: str) -> RuleSet:
    return replace(rules, rules=tuple(rule for rule in rules.rules if rule.id == rule_id))
