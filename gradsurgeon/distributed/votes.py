"""Votes of ranks on the next update, cast in the key-value store of the job, without a collective.

A rank votes at the end of a backward pass that all ranks take part in, and never waits there. It reads the votes at
its update, if it comes to one, so a rank that leaves an update out delays no rank.

One server answers some ten thousand requests per second, too few for many ranks. Therefore one rank of each host
starts a server for its ranks, and only their sum goes to the server of the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from gradsurgeon.tensors import _dist, _job_store
from gradsurgeon.tensors._channel import KEPT, Channel

# If there are more ranks, each host sums up its own.
MANY = 64
# One number holds a pass: how many ranks have voted, how many of them object, and how many stopped waiting.
OBJECTS = 1 << 20
LATE = 1 << 40
# The objections of at most this many ranks of a kind are read. Objections to an averaged gradient are alike on all ranks.
_MOST = 64
# A waiting rank asks again after this share of the time waited so far, within bounds in seconds.
_SHARE = 0.25
_SHORTEST = 0.0002
_LONGEST = 0.25


_LEFT = (
    "{having} no session any more: this update takes place, and later traps raise on their own rank"
)
_ABSENT = "{lacking} of {number} ranks did not vote on this update within {waited:.0f} s: the update takes place, on all ranks"


def voted(value: int) -> int:
    return value % OBJECTS


class Counter:
    """The votes of the ranks of a channel by key, 0 at first, given the host of each rank."""

    def __init__(self, channel: Channel, hosts: Mapping[int, str]) -> None:
        self._channel = channel
        self._host_name = hosts[channel.rank]
        here = [rank for rank, host in hosts.items() if host == self._host_name]
        self._here = len(here)
        self._by_host = len(hosts) > MANY and 1 < len(set(hosts.values())) < len(hosts)
        self._owns = min(hosts) == channel.rank
        self.serves = self._by_host and min(here) == channel.rank
        # The server of this host, if there is one, and the key that this rank reads for its host.
        self._host: Any = None
        self._reading = ""

    def open(self, limit: float) -> None:
        """Start the server of this host, or connect to it, if the ranks of a host count together."""
        if not self._by_host:
            return
        key = f"host/{self._host_name}"
        patience = timedelta(seconds=limit)
        if self.serves:
            self._host = _job_store.server(None, patience)
            self._channel.set(key, self._host.port)
        else:
            self._host = _job_store.server(self._channel.get(key), patience)

    def is_complete(self, value: int) -> bool:
        return voted(value) == len(self._channel.ranks)

    def add(self, key: str, vote: int) -> int:
        if self._owns:
            self._channel.own(key)
        if self._host is not None:
            vote = self._host.add(key, vote)
            # The last rank of a host reports for the host.
            if voted(vote) < self._here:
                return 0
        return self._channel.add(key, vote)

    def read(self, key: str) -> int:
        if self._host is None:
            return self._channel.add(key, 0)
        # If the serving rank of the host has finished and exited, the job's store has the host's sum.
        with suppress(RuntimeError):
            known = int(self._host.add(f"{key}/known", 0))
            # The first rank that asks does so for its host, and keeps asking.
            if not known and self._reading != key and self._host.add(f"{key}/reads", 1) == 1:
                self._reading = key
            if known or self._reading != key:
                return known
        value = self._channel.add(key, 0)
        if self.is_complete(value):
            with suppress(RuntimeError):
                self._host.add(f"{key}/known", value)
        return value

    def forget(self, key: str) -> None:
        """Delete an old number from the server of this host, if there is one."""
        if self.serves:
            for part in (key, f"{key}/known", f"{key}/reads"):
                self._host.delete_key(part)


class Objection(NamedTuple):
    """An objection of a rank to the next update.

    Attributes:
        rule: the id of its rule; empty if a scaler is the reason.
        concerns: the name of a parameter that the update moves.
        name: the parameter or module with the problem.
        text: the report.
        guilty: whether the rank contributed NaN or Inf to an average.
    """

    rank: int
    rule: str
    severity: int
    concerns: str
    name: str
    text: str
    guilty: bool = False


class VoteResult(NamedTuple):
    """The votes of the ranks on a pass: objections in no order that ranks share, and whether all ranks object."""

    objections: tuple[Objection, ...] = ()
    unanimous: bool = False


_GO = VoteResult()


class Voter:
    """The votes of ranks that take backward passes together.

    Args:
        channel: a channel of these ranks.
        hosts: the name of the host of each rank.
        patience: seconds to wait for a missing vote.
        notify: called once if the store fails, and whenever a vote is missing.
    """

    def __init__(
        self, channel: Channel, hosts: Sequence[str], patience: float, notify: Callable[[str], None]
    ) -> None:
        self.channel = channel
        self._counter = Counter(channel, dict(zip(channel.ranks, hosts, strict=True)))
        channel.lingers = self._counter.serves or _job_store.is_hosted_here()
        self._patience = patience
        self._notify = notify
        # Maps each pass to the known sum of votes after this rank cast its vote, and the decision.
        self._values: dict[int, int] = {}
        self._decisions: dict[int, VoteResult] = {}
        # The number of exchanges since the last vote.
        self._exchanges = 0
        # Whether some rank has stopped voting, so no vote can be complete.
        self._has_lost_rank = False
        with self._asking():
            self._counter.open(patience)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.channel.is_over:
                return
            self.channel.close()
            reason = str(error).partition("\n")[0]
            self._notify(
                f"the key-value store of the job failed ({type(error).__name__}: {reason}): from now on each rank "
                "raises if one of its own traps trips"
            )

    def cast(self, objections: Sequence[Objection]) -> int:
        """Vote on the pass that has ended; return its number."""
        self._exchanges = 0
        with self._asking():
            self.channel.go_on()
            number = self.channel.age
            vote = 1
            if objections:
                guilty = any(objection.guilty for objection in objections)
                key = f"{number}/guilty" if guilty else f"{number}/other"
                self.channel.own(key)
                place = self.channel.add(key, 1)
                if place <= _MOST:
                    self.channel.set(f"{key}/{place}", objections)
                vote += OBJECTS
            self._values[number] = self._counter.add(str(number), vote)
            old = number - KEPT
            self._values.pop(old, None)
            self._decisions.pop(old, None)
            self._counter.forget(str(old))
        return self.channel.age

    def decision(self, number: int) -> VoteResult | None:
        """Return the votes of the ranks on a recent pass; ``None`` if they are not known. It may wait."""
        if number in self._values:
            with self._asking():
                self._decisions[number] = self._read(number, self._values.pop(number))
            if self._has_lost_rank:
                self.channel.close()
        return self._decisions.get(number)

    def exchange(self, value: object, limit: float, name: str = "") -> dict[int, Any]:
        """Return the values of the ranks that come here in time, the same on all of them.

        The result is empty if the store fails, or if this rank leaves its value without waiting. Without a name all these
        ranks have read the decision on the last pass.
        """
        if not name:
            self._exchanges += 1
            name = f"{self.channel.age}/diagnosis/{self._exchanges}"
        with self._asking():
            if limit:
                return self.channel.meet(name, value, self.channel.ranks, limit)
            self.channel.set(f"{name}/{self.channel.rank}", value)
        return {}

    def _read(self, number: int, value: int) -> VoteResult:
        value = self._awaited(str(number), value)
        if value >= LATE:
            # The first rank that decides on a pass with a late vote decides for all.
            own = "go"
            if self._counter.is_complete(value):
                own = "vote"
            if self.channel.agree(f"{number}/late", own) != "vote":
                return _GO
            value = self.channel.add(str(number), 0)
        objecting = value % LATE // OBJECTS
        if not objecting:
            return _GO
        objections = [*self._objections(f"{number}/guilty"), *self._objections(f"{number}/other")]
        return VoteResult(tuple(objections), objecting == len(self.channel.ranks))

    def _awaited(self, key: str, value: int) -> int:
        began = time.monotonic()
        waited = 0.0
        gone: list[int] = []
        ranks = self.channel.ranks
        while not self._counter.is_complete(value):
            value = self._counter.read(key)
            waited = time.monotonic() - began
            if waited > _LONGEST and self.channel.add("left", 0):
                gone = [rank for rank in ranks if self.channel.check(f"left/{rank}")]
            if gone or waited > self._patience:
                break
            pause = max(_SHORTEST, _SHARE * waited)
            time.sleep(min(pause, _LONGEST))
        if self._counter.is_complete(value):
            return value
        value = self.channel.add(key, LATE)
        if self._counter.is_complete(value):
            return value
        number = len(ranks)
        text = _ABSENT.format(lacking=number - voted(value), number=number, waited=waited)
        if gone:
            text = _LEFT.format(having=_dist.having(gone))
            self._has_lost_rank = True
        self._notify(text)
        return value

    def _objections(self, kind: str) -> Iterator[Objection]:
        # Asking for the number of an unknown kind would set its key.
        if self.channel.check(kind):
            for place in range(min(self.channel.add(kind, 0), _MOST)):
                yield from self.channel.get(f"{kind}/{place + 1}")
