"""Votes of ranks on the next update, cast in the key-value store of the job, without a collective.

A rank votes at the end of a backward pass that all ranks take part in, and never waits there. It reads the votes at
its update, if it comes to one, so a rank that leaves an update out delays no rank.

One server answers some ten thousand requests per second, too few for many ranks. Therefore one rank of each host
starts a server for its ranks, and only their sum goes to the server of the job.
"""

from __future__ import annotations

import atexit
import json
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from gradsurgeon.tensors import _dist, _job_store

# If there are more ranks, each host sums up its own.
MANY = 64
# One number holds a pass: how many ranks have voted, how many of them object, and how many stopped waiting.
OBJECTS = 1 << 20
LATE = 1 << 40
# The number of passes whose votes are kept: one optimizer may step after the passes of others.
_KEPT = 16
# At most this many objections of a kind are read. Objections to an averaged gradient are alike on all ranks.
_MOST = 64
# Seconds: the longest that the rank hosting the store waits for other ranks at its exit.
LINGER = 10.0
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
    """The votes of ranks by key, 0 at first, in a store that only they use, given the host of each rank."""

    def __init__(self, store: _job_store.OwnStore, hosts: Mapping[int, str]) -> None:
        rank = _dist.rank()
        here = [other for other, host in hosts.items() if host == hosts[rank]]
        self._by_host = len(hosts) > MANY and 1 < len(set(hosts.values())) < len(hosts)
        self._store, self._number, self._here = store, len(hosts), len(here)
        self._cleans, self.serves = min(hosts) == rank, self._by_host and min(here) == rank
        self._key = f"host/{hosts[rank]}"
        # The server of this host, if there is one, and the key that this rank reads for its host.
        self._host: Any = None
        self._reading = ""

    def open(self) -> None:
        """Start the server of this host, or connect to it, if the ranks of a host count together."""
        if not self._by_host:
            return
        port = None if self.serves else int(self._store.get(self._key))
        self._host = _job_store.server(port, self._store.timeout)
        if self.serves:
            self._store.set(self._key, str(self._host.port))

    def is_complete(self, value: int) -> bool:
        return voted(value) == self._number

    def add(self, key: str, vote: int) -> int:
        if self._host is not None:
            vote = int(self._host.add(key, vote))
            # The last rank of a host reports for the host.
            if voted(vote) < self._here:
                return 0
        return self._store.add(key, vote)

    def read(self, key: str) -> int:
        # If the serving rank of the host has finished and exited, the job's store has the host's sum.
        with suppress(RuntimeError):
            if self._host is not None and (known := self._known(key)) is not None:
                return known
        value = self._store.add(key, 0)
        if self._host is not None and self.is_complete(value):
            with suppress(RuntimeError):
                self._host.add(f"{key}/known", value)
        return value

    def _known(self, key: str) -> int | None:
        """Return the sum that the server of this host has, ``None`` if this rank has to ask for the host."""
        if known := int(self._host.add(f"{key}/known", 0)):
            return known
        # The first rank that asks does so for its host, and keeps asking.
        if self._reading != key and self._host.add(f"{key}/reads", 1) == 1:
            self._reading = key
        return None if self._reading == key else 0

    def delete(self, key: str) -> None:
        """Forget a number. All ranks must call it."""
        if self.serves:
            for part in (key, f"{key}/known", f"{key}/reads"):
                self._host.delete_key(part)
        if self._cleans:
            self._store.delete_key(key)


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
_open: weakref.WeakSet[Voter] = weakref.WeakSet()
# Of voters that closed before other ranks: the store, the number of ranks, and whether this process serves others.
# The process that hosts the store waits for them. A voter itself would keep its session alive.
_left: list[tuple[_job_store.OwnStore, int, bool]] = []


class Voter:
    """The votes of ranks that take backward passes together.

    Args:
        prefix: the prefix of the keys, the same on all ranks and used for nothing else.
        ranks: the ranks that vote.
        hosts: the name of the host of each rank.
        patience: seconds to wait for a missing vote.
        tell: called once if the store fails, and whenever a vote is missing.
    """

    def __init__(
        self,
        prefix: str,
        ranks: Sequence[int],
        hosts: Sequence[str],
        patience: float,
        tell: Callable[[str], None],
    ) -> None:
        self._store = _job_store.OwnStore(prefix)
        self._counter = Counter(self._store, dict(zip(ranks, hosts, strict=True)))
        self.ranks = tuple(ranks)
        self._patience = patience
        self._notify = tell
        # The process group may be gone when the voter closes.
        self._rank = _dist.rank()
        self._passes = 0
        # By pass: the known sum of votes after this rank cast its vote, and the decision.
        self._values: dict[int, int] = {}
        self._decisions: dict[int, VoteResult] = {}
        # The keys of this rank's objections, with the pass.
        self._keys: deque[tuple[int, str]] = deque()
        self._met = 0
        # Whether some rank has stopped voting, so no vote can be complete.
        self._is_left = False
        self.is_over = False
        _open.add(self)
        with self._asking():
            self._counter.open()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.close()
            reason = str(error).partition("\n")[0]
            self._notify(
                f"the key-value store of the job failed ({type(error).__name__}: {reason}): from now on each rank "
                "raises if one of its own traps trips"
            )

    def cast(self, objections: Sequence[Objection]) -> int:
        self._passes += 1
        self._met = 0
        if not self.is_over:
            with self._asking():
                for objection in objections:
                    self._object(objection)
                vote = 1 + OBJECTS * bool(objections)
                self._values[self._passes] = self._counter.add(str(self._passes), vote)
                self._clean()
        return self._passes

    def decision(self, number: int) -> VoteResult | None:
        """Return the votes of the ranks on a recent pass; ``None`` if they are not known. It may wait."""
        if number in self._values and not self.is_over:
            with self._asking():
                self._decisions[number] = self._read(number, self._values.pop(number))
            if self._is_left:
                self.close()
        return self._decisions.get(number)

    def exchange(self, value: object, limit: float) -> dict[int, Any]:
        """Return the picklable values of the ranks that come here in time, the same on all of them.

        The result is empty if the store fails. All these ranks have read the decision on the last pass.
        """
        self._met += 1
        prefix = f"{self._passes}/met/{self._met}"
        values = dict[int, Any]()
        own = f"{prefix}/{self._rank}"
        closed = f"{prefix}/closed"
        if not self.is_over:
            with self._asking():
                self._store.set(own, pickle.dumps(value))
                self._keys.append((self._passes, own))
                here = _job_store.present(
                    self._store, self.ranks, limit, under=f"{prefix}/", until=closed
                )
                agreed = json.loads(self._store.compare_set(closed, "", json.dumps(here)))
                # The ranks of one job trust each other: torch sends pickled objects in the same way.
                texts = {rank: self._store.get(f"{prefix}/{rank}") for rank in agreed}
                values = {rank: pickle.loads(text) for rank, text in texts.items()}  # noqa: S301 # see above
        return values

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            # If the store has gone first, no rank needs to know.
            with suppress(RuntimeError):
                self._store.set(f"gone/{self._rank}", "")
                self._store.add("gone", 1)
            _left[:] = [one for one in _left if not _is_over(*one[:2])]
            _left.append((self._store, len(self.ranks), self._counter.serves))
        _open.discard(self)

    def _object(self, objection: Objection) -> None:
        kind = f"{self._passes}/{'guilty' if objection.guilty else 'other'}"
        number = self._store.add(kind, 1)
        if number <= _MOST:
            self._store.set(f"{kind}/{number}", json.dumps(objection))
            self._keys.append((self._passes, f"{kind}/{number}"))
        if number == 1:
            self._keys.append((self._passes, kind))

    def _read(self, number: int, value: int) -> VoteResult:
        value = self._awaited(str(number), value)
        if value >= LATE:
            # The first rank that decides on a pass with a late vote decides for all.
            own = "vote" if self._counter.is_complete(value) else "go"
            if self._store.compare_set(f"{number}/late", "", own) != b"vote":
                return _GO
            value = self._store.add(str(number), 0)
        objecting = value % LATE // OBJECTS
        if not objecting:
            return _GO
        found = [*self._objections(number, "guilty"), *self._objections(number, "other")]
        return VoteResult(tuple(found), objecting == len(self.ranks))

    def _awaited(self, key: str, value: int) -> int:
        began = time.monotonic()
        is_complete = self._counter.is_complete
        while not is_complete(value) and not is_complete(value := self._counter.read(key)):
            waited = time.monotonic() - began
            gone = self._gone() if waited > _LONGEST else []
            if gone or waited > self._patience:
                value = self._store.add(key, LATE)
                if not is_complete(value):
                    lacking = len(self.ranks) - voted(value)
                    facts = {"lacking": lacking, "number": len(self.ranks), "waited": waited}
                    text = _LEFT if gone else _ABSENT
                    self._notify(text.format(having=_dist.having(gone), **facts))
                    self._is_left = bool(gone)
                break
            time.sleep(min(max(_SHORTEST, _SHARE * waited), _LONGEST))
        return value

    def _gone(self) -> list[int]:
        if not self._store.add("gone", 0):
            return []
        return [rank for rank in self.ranks if self._store.check([f"gone/{rank}"])]

    def _objections(self, number: int, kind: str) -> list[Objection]:
        kind = f"{number}/{kind}"
        if not self._store.check([kind]):
            return []
        most = min(self._store.add(kind, 0), _MOST)
        texts = [self._store.get(f"{kind}/{index + 1}") for index in range(most)]
        return [Objection(*json.loads(text)) for text in texts]

    def _clean(self) -> None:
        old = self._passes - _KEPT
        self._values.pop(old, None)
        self._decisions.pop(old, None)
        if old > 0:
            self._counter.delete(str(old))
        while self._keys and self._keys[0][0] <= old:
            self._store.delete_key(self._keys.popleft()[1])


def _is_over(store: _job_store.OwnStore, number: int) -> bool:
    try:
        return store.add("gone", 0) >= number
    except RuntimeError:
        return True


@atexit.register
def _leave() -> None:
    for voter in list(_open):
        voter.close()
    end = time.monotonic() + LINGER
    hosts = _dist.rank() == 0 and not _job_store.is_hosted_by_agent()
    for left in _left:
        while (left[2] or hosts) and not _is_over(*left[:2]):
            if time.monotonic() > end:
                return
            time.sleep(_LONGEST / 10)
