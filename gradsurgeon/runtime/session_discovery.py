"""How the sessions of several ranks find each other before they first agree on anything.

A collective would wait for ever for a rank that has no session (`if rank == 0: apply(...)`), so they
meet in the key-value store of the job, for a limited time. Who closes the roll first closes it for
all: whoever comes later reads the same list, and all draw the same conclusion from it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gradsurgeon import _dist

# Seconds. Ranks that have just reduced a gradient together come to their update at nearly the same
# time; and the one that is not waited for must not lose patience with its own next collective.
LIMIT = 10.0
_PAUSE = 0.002

# How often sessions with the same shapes have met on a group: the first meeting of one is the next of
# these on all ranks, in whichever order they were applied. What a process has counted is never counted
# again, whatever becomes of its groups.
_met: Counter[str] = Counter()


class SessionInfo(NamedTuple):
    """What one rank says of its session.

    Attributes:
        plan: tells the rules that act, and the mode, from others.
        step: what the clock of the optimizer says.
        drifts: whether weights differ between ranks where not all have these rules.
    """

    plan: str
    step: int
    drifts: bool


def call(
    group: Any, shapes: Sequence[tuple[int, ...]], mine: SessionInfo
) -> dict[int, SessionInfo]:
    """Return the sessions of the ranks of a group that come to the same roll as this one, in time.

    The shapes tell the model from others that these ranks train.
    """
    kind = hashlib.sha256(repr(list(shapes)).encode()).hexdigest()[:16]
    topic = f"gradsurgeon/roll/{group.group_name}/{kind}"
    while True:
        prefix = f"{topic}/{_met[topic]}"
        _met[topic] += 1
        publish(prefix, mine)
        here = wait_for(prefix, _dist.members(group), until=f"{prefix}/closed")
        closed = json.loads(_dist.store().compare_set(f"{prefix}/closed", "", json.dumps(here)))
        # One that was closed before was that of another session: other ranks have had one more.
        if _dist.rank() in closed:
            return {rank: SessionInfo(*published(prefix, rank)) for rank in closed}


def publish(prefix: str, value: Any) -> None:
    """Leave a value of this rank in the store."""
    _dist.store().set(f"{prefix}/{_dist.rank()}", json.dumps(value))


def published(prefix: str, rank: int) -> Any:
    """Return the value that a rank has left in the store."""
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
    """Return what a message says of ranks whose value has not come."""
    return f"nothing heard of rules on {_dist.named(ranks)} within {LIMIT:g} s"
