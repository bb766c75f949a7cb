"""How the ranks find each other's rules and sessions before they first agree on anything.

A collective would wait for ever for a rank that has no session (`if rank == 0: apply(...)`), so they
meet in the key-value store of the job, for a limited time. Who closes the roll first closes it for
all: whoever comes later reads the same list, and all draw the same conclusion from it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gradsurgeon import _dist
from gradsurgeon.planning import Plan, is_for, shortfalls
from gradsurgeon.schema import RuleSet

# Seconds. Ranks that have just reduced a gradient together come to their update at nearly the same
# time; and the one that is not waited for must not lose patience with its own next collective.
LIMIT = 10.0
_PAUSE = 0.002

# How often sessions with the same shapes have met on a group: the first meeting of one is the next of
# these on all ranks, in whichever order they were applied. What a process has counted is never counted
# again, whatever becomes of its groups.
_met: Counter[str] = Counter()

Names = dict[str, list[str]]

# The names that this rank has matched so far, by the rules: a script may apply the same ones to several
# models.
_matched: dict[str, Names] = {}


class SessionInfo(NamedTuple):
    # Tells the rules that act, and the mode, from others.
    plan: str
    step: int
    # Whether weights differ between ranks where not all have these rules.
    drifts: bool
    # Whether rules measure whole gradients that are divided over ranks.
    measures: bool
    host: str
    # The ranks of all groups that it shares gradients with.
    peers: tuple[int, ...]


class Roll(NamedTuple):
    """The sessions that train one model together.

    Attributes:
        prefix: of keys in the store of the job that no others have.
        wanted: the ranks that are to have one: peers, their peers, and so on.
        sessions: by rank those that have come in time, alike on all ranks.
    """

    prefix: str
    wanted: tuple[int, ...]
    sessions: dict[int, SessionInfo]


def call(groups: _dist.Groups, shapes: Sequence[tuple[int, ...]], info: SessionInfo) -> Roll:
    """Return the sessions of the ranks of some groups that come to the same roll as this one, in time.

    The shapes tell the model from others that these ranks train.
    """
    kind = hashlib.sha256(repr(list(shapes)).encode()).hexdigest()[:16]
    # The ranks of a mesh are in other groups each.
    name = groups[0].group_name if len(groups) == 1 else ""
    topic = f"{_dist.attempt()}/roll/{name}/{kind}"
    while True:
        prefix = f"{topic}/{_met[topic]}"
        _met[topic] += 1
        publish(prefix, info)
        wanted, here = _peers(prefix, info)
        closed = json.loads(_dist.store().compare_set(f"{prefix}/closed", "", json.dumps(here)))
        # One that was closed before was that of another session: other ranks have had one more.
        if _dist.rank() in closed:
            sessions = {rank: SessionInfo(*published(prefix, rank)) for rank in closed}
            # Who has closed it may have known more of them.
            peers = {rank for session in sessions.values() for rank in session.peers}
            return Roll(f"{prefix}/votes", tuple(sorted({*wanted, *peers})), sessions)


def _peers(prefix: str, info: SessionInfo) -> tuple[list[int], list[int]]:
    """Return the ranks that share gradients with this one, or with others that do, and those that have come."""
    wanted = sorted(info.peers)
    while True:
        here = wait_for(prefix, wanted, until=f"{prefix}/closed")
        more = {rank for one in here for rank in SessionInfo(*published(prefix, one)).peers}
        if more <= set(wanted):
            return wanted, here
        wanted = sorted(more.union(wanted))


def publish(prefix: str, value: Any) -> None:
    _dist.store().set(f"{prefix}/{_dist.rank()}", json.dumps(value))


def published(prefix: str, rank: int) -> Any:
    return json.loads(_dist.store().get(f"{prefix}/{rank}"))


def wait_for(prefix: str, ranks: Iterable[int], until: str = "") -> list[int]:
    """Return the ranks whose value has come in time, or before the key ``until`` has."""
    store, end, missing = _dist.store(), time.monotonic() + LIMIT, set(ranks)
    wanted = sorted(missing)
    while True:
        over = time.monotonic() > end or (until and store.check([until]))
        # Asked again and again: `wait` of the store writes to stderr when it gives up.
        missing = {rank for rank in missing if not store.check([f"{prefix}/{rank}"])}
        if not missing or over:
            return [rank for rank in wanted if rank not in missing]
        time.sleep(_PAUSE)


def unheard(ranks: Sequence[int]) -> str:
    return f"nothing heard of rules on {_dist.named(ranks)} within {LIMIT:g} s"


def lacking(
    rules: RuleSet, plans: Mapping[str, Plan], *, alone: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return what is wrong with rules that match too little on all ranks, and where what is lacking here is.

    The stages of a pipeline are models of their own. ``alone``: the rules are meant for this one model;
    one for models of another class may have none.
    """
    models = {title: plan.manifest for title, plan in plans.items()}
    if _dist.world() == 1:
        return shortfalls(rules, models), {}
    prefix = f"{_dist.attempt()}/matched/{rules.sha256}"
    mine = _publish(prefix, rules, plans)
    asked = [
        rule
        for rule in rules.rules
        if rule.expect or shortfalls(_only(rules, rule.id), models)
        if not (alone and rule.model)
        or any(is_for(str(rule.model), manifest) for manifest in models.values())
    ]
    if not asked:
        return [], {}
    matched: dict[int, Names] = {
        rank: published(prefix, rank) for rank in wait_for(prefix, range(_dist.world()))
    }
    absent = [rank for rank in range(_dist.world()) if rank not in matched]
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
            here = f"matches nothing on rank {_dist.rank()}"
            notes[rule.id] = f"{here}; {_dist.having(having)} it"
    return errors, notes


def _publish(prefix: str, rules: RuleSet, plans: Mapping[str, Plan]) -> Names:
    mine = _matched.setdefault(rules.sha256, {})
    for plan in plans.values():
        for rule in rules.rules:
            names = [binding.name for binding in plan.of(rule.id)]
            # How many there are is asked of few rules; of the others one name is enough.
            mine[rule.id] = sorted({*mine.get(rule.id, ()), *(names if rule.expect else names[:1])})
    publish(prefix, mine)
    return mine


def _only(rules: RuleSet, rule_id: str) -> RuleSet:
    return replace(rules, rules=tuple(rule for rule in rules.rules if rule.id == rule_id))
