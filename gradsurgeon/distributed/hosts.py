"""Numbers in a key-value store that many ranks add to; the ranks of one host add together.

One server answers some ten thousand requests per second, so many ranks would all wait for it. Therefore one rank of
each host starts a server for the ranks of this host, and only their sum goes to the server of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gradsurgeon import _dist

# If there are more ranks, each host sums up its own.
MANY = 64
# One number holds a pass: how many ranks have voted, how many of them object, and how many stopped waiting.
OBJECTS, LATE = 1 << 20, 1 << 40


def voted(value: int) -> int:
    """Return how many ranks have voted on a pass."""
    return value % OBJECTS


class Counter:
    """The votes of some ranks by key, 0 at first, in the store of the job.

    Args:
        store: the store, with a prefix that only these ranks use.
        hosts: the name of the host of each rank.
    """

    # Whether other ranks read from a server in this process.
    serves = False

    def __init__(self, store: Any, hosts: Mapping[int, str]) -> None:
        self._store, self._number = store, len(hosts)
        self._cleans = min(hosts) == _dist.rank()

    def is_complete(self, value: int) -> bool:
        """Return whether all ranks have voted."""
        return voted(value) == self._number

    def add(self, key: str, vote: int) -> int:
        """Add the vote of this rank; return the known sum."""
        return int(self._store.add(key, vote))

    def look(self, key: str) -> int:
        """Return the known sum."""
        return int(self._store.add(key, 0))

    def delete(self, key: str) -> None:
        """Forget a number. All ranks must call it."""
        if self._cleans:
            self._store.delete_key(key)


def counter_of(store: Any, hosts: Mapping[int, str]) -> Counter:
    several = 1 < len(set(hosts.values())) < len(hosts)
    return _OfHosts(store, hosts) if len(hosts) > MANY and several else Counter(store, hosts)


class _OfHosts(Counter):
    def __init__(self, store: Any, hosts: Mapping[int, str]) -> None:
        super().__init__(store, hosts)
        own = hosts[_dist.rank()]
        here = sorted(rank for rank, host in hosts.items() if host == own)
        self._here = len(here)
        self.serves = here[0] == _dist.rank()
        if self.serves:
            self._host = _dist.server(None, store.timeout)
            store.set(f"host/{own}", str(self._host.port))
        else:
            self._host = _dist.server(int(store.get(f"host/{own}")), store.timeout)
        self._reading = ""

    def add(self, key: str, vote: int) -> int:
        ours = int(self._host.add(key, vote))
        # The last rank of a host reports for the host.
        return super().add(key, ours) if voted(ours) == self._here else 0

    def look(self, key: str) -> int:
        # If the serving rank of the host has finished and exited, the job's store has the host's sum.
        with suppress(RuntimeError):
            if known := int(self._host.add(f"{key}/known", 0)):
                return known
            # The first rank that asks does so for its host, and keeps asking.
            if self._reading != key and self._host.add(f"{key}/reads", 1) == 1:
                self._reading = key
            if self._reading != key:
                return 0
        value = super().look(key)
        if self.is_complete(value):
            with suppress(RuntimeError):
                self._host.add(f"{key}/known", value)
        return value

    def delete(self, key: str) -> None:
        if self.serves:
            for part in (key, f"{key}/known", f"{key}/reads"):
                self._host.delete_key(part)
        super().delete(key)
