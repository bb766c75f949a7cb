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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsurgeon import _dist

# Seconds. Ranks that have just reduced a gradient together come to their update at nearly the same
# time; and the one that is not waited for must not lose patience with its own next collective.
LIMIT = 10.0
_PAUSE = 0.002

# How often sessions with the same shapes have met on a group: the first meeting of one is the next of
# these on all ranks, in whichever order they were applied. What a process has counted is never counted
# again, whatever becomes of its groups.
_met: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What one rank says of its session.

    Attributes:
        plan: tells the rules that act, and the mode, from others.
        step: what the clock of the optimizer says.
        drifts: whether weights differ between ranks where not all have these rules.
    """

    plan: str
    step: int
    drifts: bool


@dataclass(frozen=True, slots=True)
class Sessions:
    """Who has answered, by rank, and who ought to have."""

    wanted: tuple[int, ...]
    answers: Mapping[int, SessionInfo]

    @property
    def absent(self) -> list[int]:
        return [rank for rank in self.wanted if rank not in self.answers]

    def others(self, mine: SessionInfo) -> list[int]:
        """Return the ranks that have other rules than this one, or count otherwise."""
        expected = (mine.plan, mine.step)
        return [rank for rank, a in self.answers.items() if (a.plan, a.step) != expected]

    @property
    def drifts(self) -> bool:
        """Whether some rank has rules that all ranks must have."""
        return any(answer.drifts for answer in self.answers.values())


def call(group: Any, shapes: Sequence[tuple[int, ...]], mine: SessionInfo) -> Sessions:
    """Find the sessions of the other ranks of a group; wait for them for a limited time.

    The shapes tell the model from others that these ranks train.
    """
    kind = hashlib.sha256(repr(list(shapes)).encode()).hexdigest()[:16]
    topic = f"gradsurgeon/roll/{group.group_name}/{kind}"
    late: Sessions | None = None
    while True:
        prefix = f"{topic}/{_met[topic]}"
        _met[topic] += 1
        roll = _answer(prefix, _dist.members(group), mine, again=late is not None)
        if _dist.rank() in roll.answers:
            return roll
        if not roll.answers and late is not None:
            # Nobody else has come to this one: so it was the one before that was meant.
            return late
        # It was closed before this rank had come; or it was that of another session, on ranks that had
        # one more of the same shapes, and theirs is the next one.
        late = roll if roll.answers else late


def _answer(prefix: str, wanted: Sequence[int], mine: SessionInfo, *, again: bool) -> Sessions:
    """Answer to the roll under a prefix of the store; return it once it is closed, be it by this rank."""
    publish(prefix, asdict(mine))
    missing = wait_for(prefix, wanted, until=f"{prefix}/closed")
    here = [rank for rank in wanted if rank not in missing]
    if again and here == [_dist.rank()]:
        # It has come too late to another one, and leaves no trace where it is alone here as well.
        here = []
    closed = json.loads(_dist.store().compare_set(f"{prefix}/closed", "", json.dumps(here)))
    return Sessions(
        tuple(wanted), {rank: SessionInfo(**published(prefix, rank)) for rank in closed}
    )


def publish(prefix: str, value: Any) -> None:
    """Leave a value of this rank in the store."""
    _dist.store().set(f"{prefix}/{_dist.rank()}", json.dumps(value))


def published(prefix: str, rank: int) -> Any:
    """Return the value that a rank has left in the store."""
    return json.loads(_dist.store().get(f"{prefix}/{rank}"))


def wait_for(prefix: str, ranks: Sequence[int], until: str = "") -> list[int]:
    """Return the ranks whose value has not come in time, or before the key ``until`` has."""
    store, end, missing = _dist.store(), time.monotonic() + LIMIT, list(ranks)
    while True:
        over = time.monotonic() > end or (until and store.check([until]))
        # Asked again and again: `wait` of the store writes to stderr when it gives up.
        missing = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
        if not missing or over:
            return missing
        time.sleep(_PAUSE)
