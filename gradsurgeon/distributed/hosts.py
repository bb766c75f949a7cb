"""Numbers in a key-value store that many ranks add to; the ranks of one host add together.

One server answers some ten thousand requests per second, so many ranks would all wait for it. Therefore one rank of
each host starts a server for the ranks of this host, and only their sum goes to the server of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from gradsurgeon import _dist

# If there are more ranks, each host sums up its own.
MANY = 64


class Counter:
    """Numbers by key, 0 at first, in the store of the job.

    Args:
        store: the store, with a prefix that only these ranks use.
        ranks: the ranks that add to the numbers.
    """

    # Whether other ranks read from a server in this process.
    serves = False

    def __init__(self, store: Any, ranks: Iterable[int]) -> None:
        self._store = store
        self._cleans = min(ranks) == _dist.rank()

    def add(self, key: str, amount: int, count: Callable[[int], int]) -> int:
        """Add the share of this rank to a number; return the known sum.

        ``count`` returns how many ranks have added to a sum.
        """
        del count
        return int(self._store.add(key, amount))

    def look(self, key: str, is_complete: Callable[[int], bool]) -> int:
        """Return the known sum."""
        del is_complete
        return int(self._store.add(key, 0))

    def delete(self, key: str) -> None:
        """Forget a number. All ranks must call it."""
        if self._cleans:
            self._store.delete_key(key)


def counter_of(store: Any, hosts: Mapping[int, str]) -> Counter:
    """Return the numbers of some ranks, given the store of the job and the name of the host of each rank."""
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

    def add(self, key: str, amount: int, count: Callable[[int], int]) -> int:
        ours = int(self._host.add(key, amount))
        # The last rank of a host reports for the host.
        return int(self._store.add(key, ours)) if count(ours) == self._here else 0

    def look(self, key: str, is_complete: Callable[[int], bool]) -> int:
        with suppress(RuntimeError):
            return self._look(key, is_complete)
        # The serving rank of the host has finished and exited; the job's store has the host's sum.
        return super().look(key, is_complete)

    def _look(self, key: str, is_complete: Callable[[int], bool]) -> int:
        if known := int(self._host.add(f"{key}/known", 0)):
            return known
        # The first rank that asks does so for its host, and keeps asking.
        if self._reading != key and self._host.add(f"{key}/reads", 1) == 1:
            self._reading = key
        if self._reading != key:
            return 0
        value = int(self._store.add(key, 0))
        if is_complete(value):
            self._host.add(f"{key}/known", value)
        return value

    def delete(self, key: str) -> None:
        if self.serves:
            for part in (key, f"{key}/known", f"{key}/reads"):
                self._host.delete_key(part)
        super().delete(key)
