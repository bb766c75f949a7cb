"""The channel between ranks: all keys that the package puts into the key-value store of the job. No collectives.

A channel has a topic, and ends when all of its ranks have left. Its keys, after the attempt of the job and the topic:

| topic | key | who posts it | who reads it | when it goes |
|---|---|---|---|---|
| `matched/RULES` | `names/RANK` | each rank that binds rules | ranks whose rules match too little | stays: ranks bind later models |
| `sessions/MODEL/N` | `met/RANK` | each session of a model | ranks that share its gradients | with the channel |
| | `met/closed` | the first rank that waits no longer | the same ranks | with the channel; stays for ranks that are missing |
| | `host/HOST` | one rank of each host, above 64 ranks | the ranks of its host | with the channel |
| | `PASS`, `PASS/late` | each rank adds its vote | ranks that update | 16 passes later |
| | `PASS/guilty/N`, `PASS/other/N` | ranks that object | ranks that update | 16 passes later |
| | `PASS/diagnosis/N/RANK` and `.../closed` | ranks that replayed a failed step | the same ranks | 16 passes later |
| | `PASS/late/N/TOPIC/RANK` and `.../closed` | ranks whose device has left an update out | the same ranks | 16 passes later |
| `sessions/MODEL/N/rows`, or without `rows` | `READER/SENDER/N` | ranks that hold shards | the rank that merges them | when read |
| | `asked/LEADER/N/RECORD/RANK`, `.../closed`, `.../answer` | ranks that ask for a record | the same ranks | 16 questions later |
| `replicas/RULE/N/KEY` | `READER/SENDER/N` | ranks that hold a replica | the first of them | when read |
| each | `left`, `left/RANK` | a rank that leaves | ranks that wait for it | with the channel |

The last rank that leaves a channel deletes the keys that are still there.
"""

from __future__ import annotations

import atexit
import json
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from gradsurgeon.tensors import _job_store

# Seconds between two looks for the keys of other ranks.
_PAUSE = 0.002
# A key is deleted when its rank has gone on this often: one optimizer may step after the passes of others. Keys from before
# the first time go with the channel.
KEPT = 16
# A rank that has not read this many messages of another rank gets no more from it.
_MOST_UNREAD = 64
# Seconds: the longest that the rank hosting the store waits at its exit for ranks that still read votes.
LINGER = 10.0
_LINGER_PAUSE = 0.025

# How many sessions of this process had a topic. A count never goes back, even if process groups are gone.
_sessions = Counter[str]()
_open: weakref.WeakSet[Channel] = weakref.WeakSet()
# Channels that this process has left before other ranks, which need it.
_left: list[Channel] = []


def numbered(topic: str) -> str:
    """Return the topic of the next session. Ranks count alike, because each applies its sessions in the same order."""
    _sessions[topic] += 1
    return f"{topic}/{_sessions[topic]}"


class Channel:
    """What some ranks tell each other about one topic. After a failed request, each call raises `RuntimeError`.

    Attributes:
        topic: what no other channel of the job has.
        ranks: the ranks that leave the channel at last.
        age: how often this rank has gone on: keys go when they are old.
        lingers: whether other ranks need this process until they have left the channel.
        is_over: whether this rank has left.
    """

    def __init__(
        self,
        topic: str,
        ranks: Sequence[int] = (),
        connection: _job_store.Connection | None = None,
    ) -> None:
        self.topic = topic
        self._prefix = f"{_job_store.attempt()}/{topic}"
        if connection is None:
            connection = _job_store.connect()
        self._connection = connection
        self.ranks = tuple(ranks)
        self.rank = self._connection.rank
        self.age = 0
        self.lingers = False
        self.is_over = False
        # The keys of this rank, each with the age at which it was last set.
        self._keys: dict[str, int] = {}
        # Maps each rank to the number of messages posted to it and taken from it.
        self._posted = Counter[int]()
        self._taken = Counter[int]()
        _open.add(self)

    def at(self, topic: str) -> Channel:
        """Return a channel of the same ranks on another topic, even if the process groups are gone."""
        return Channel(topic, self.ranks, self._connection)

    def request(self, name: str, *args: Any) -> Any:
        if self.is_over:
            raise RuntimeError("this rank has left the channel")
        return self._connection.request(self._prefix, name, *args)

    def set(self, key: str, message: object) -> None:
        """Leave a message for all ranks; it replaces an earlier one."""
        self.request("set", key, pickle.dumps(message))
        self.own(key)

    def get(self, key: str) -> Any:
        """Return a message. Waits until some rank has set it."""
        # The ranks of one job trust each other: torch sends pickled objects in the same way.
        return pickle.loads(self.request("get", key))  # noqa: S301 # see above

    def check(self, *keys: str) -> bool:
        return bool(self.request("check", list(keys)))

    def add(self, key: str, number: int) -> int:
        return int(self.request("add", key, number))

    def agree(self, key: str, value: object) -> Any:
        """Return the plain value of the first rank that calls this."""
        first = self.request("compare_set", key, "", json.dumps(value))
        self.own(key)
        return json.loads(first)

    def own(self, key: str) -> None:
        """Delete a key when it is old."""
        self._keys[key] = self.age

    def keep(self, key: str) -> None:
        """Keep a key in the store for good."""
        self._keys.pop(key, None)

    def post(self, reader: int, message: object) -> None:
        """Send a message to a rank. It is lost while that rank has too many to read."""
        number = self._posted[reader] + 1
        if not self.check(f"{reader}/{self.rank}/{number - _MOST_UNREAD}"):
            self.request("set", f"{reader}/{self.rank}/{number}", pickle.dumps(message))
            self._posted[reader] = number

    def take(self, senders: Sequence[int]) -> list[Any] | None:
        """Return and remove the next message of each of some ranks; ``None`` unless all of them are there."""
        keys = [f"{self.rank}/{sender}/{self._taken[sender] + 1}" for sender in senders]
        if not self.check(*keys):
            return None
        messages = list(map(self.get, keys))
        for key in keys:
            self.request("delete_key", key)
        self._taken.update(senders)
        return messages

    def is_met(self, name: str, ranks: Iterable[int]) -> bool:
        """Tell whether some ranks have come to a meeting, or another rank has closed it."""
        are_here = self.check(*[f"{name}/{rank}" for rank in ranks])
        return are_here or self.check(f"{name}/closed")

    def present(self, name: str, ranks: Iterable[int], limit: float) -> list[int]:
        """Return the ranks that come to a meeting within some seconds, or before another rank closes it."""
        wanted = sorted(ranks)
        end = time.monotonic() + limit
        # Polled, because `wait` of the store writes to stderr when it gives up.
        while not self.is_met(name, wanted) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return [rank for rank in wanted if self.check(f"{name}/{rank}")]

    def meet(
        self, name: str, message: object, ranks: Iterable[int], limit: float
    ) -> dict[int, Any]:
        """Return the messages of the ranks that come within some seconds, the same on all of them."""
        self.set(f"{name}/{self.rank}", message)
        here = self.present(name, ranks, limit)
        agreed = self.agree(f"{name}/closed", here)
        return {rank: self.get(f"{name}/{rank}") for rank in agreed}

    def go_on(self) -> None:
        """Grow older, and delete the keys of this rank that are old."""
        self.age += 1
        for key, age in list(self._keys.items()):
            if 0 < age <= self.age - KEPT:
                self.request("delete_key", key)
                del self._keys[key]

    def close(self) -> None:
        """Leave. The last rank deletes all keys. If the store has gone first, no rank needs to know."""
        if self.is_over:
            return
        with suppress(RuntimeError):
            leftovers = (self._keys, self._posted)
            self.request("set", f"left/{self.rank}", pickle.dumps(leftovers))
            if self.add("left", 1) == len(self.ranks):
                self._sweep()
        self.is_over = True
        _open.discard(self)
        if self.lingers:
            _left[:] = [channel for channel in _left if not channel.is_swept()]
            _left.append(self)

    def _sweep(self) -> None:
        for rank in self.ranks:
            left = f"left/{rank}"
            keys, posted = self.get(left)
            for key in (*keys, left):
                self.request("delete_key", key)
            for reader, number in posted.items():
                # The unread messages are the newest ones.
                while self.request("delete_key", f"{reader}/{rank}/{number}"):
                    number -= 1  # noqa: PLW2901 # counted down
        self.request("delete_key", "left")

    def is_swept(self) -> bool:
        try:
            return not self._connection.request(self._prefix, "check", [f"left/{self.rank}"])
        except RuntimeError:
            return True


@atexit.register
def _leave_all() -> None:
    for channel in list(_open):
        channel.close()
    end = time.monotonic() + LINGER
    for channel in _left:
        while not channel.is_swept():
            if time.monotonic() > end:
                return
            time.sleep(_LINGER_PAUSE)
