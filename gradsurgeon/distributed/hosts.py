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

    Attributes:
        serves: whether other ranks read from a server in this process.
    """

    def __init__(self, store: Any, hosts: Mapping[int, str]) -> None:
        rank = _dist.rank()
        here = [other for other, host in hosts.items() if host == hosts[rank]]
        by_host = len(hosts) > MANY and 1 < len(set(hosts.values())) < len(hosts)
        self._store, self._number, self._here = store, len(hosts), len(here)
        self._cleans, self.serves = min(hosts) == rank, by_host and min(here) == rank
        # The server of this host, if there is one, and the key that this rank reads for its host.
        self._host: Any = None
        self._reading = ""
        if by_host:
            key = f"host/{hosts[rank]}"
            port = None if self.serves else int(store.get(key))
            self._host = _dist.server(port, store.timeout)
            if self.serves:
                store.set(key, str(self._host.port))

    def is_complete(self, value: int) -> bool:
        """Return whether all ranks have voted."""
        return voted(value) == self._number

    def add(self, key: str, vote: int) -> int:
        """Add the vote of this rank; return the known sum."""
        if self._host is not None:
            vote = int(self._host.add(key, vote))
            # The last rank of a host reports for the host.
            if voted(vote) < self._here:
                return 0
        return int(self._store.add(key, vote))

    def look(self, key: str) -> int:
        """Return the known sum."""
        # If the serving rank of the host has finished and exited, the job's store has the host's sum.
        with suppress(RuntimeError):
            if self._host is not None and (known := self._known(key)) is not None:
                return known
        value = int(self._store.add(key, 0))
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
