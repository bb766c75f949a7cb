"""Messages between ranks that train replicas, through the key-value store of the job, waiting for nobody."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gradsurgeon import _dist

# The sessions of this process so far, by their parameters: ranks apply theirs in one order.
_sessions: Counter[str] = Counter()
# Numbers by the count of passes.
Rows = Mapping[int, Sequence[float]]


class Mail:
    """Exchanges rows of numbers with the ranks that hold replicas of the parameters.

    Args:
        names: the parameters of the session; sessions with the same parameters share a prefix of keys.
        averaged: returns the parameters whose gradients `DistributedDataParallel` averages; none without a wrapper.
        is_local: tells whether the gradients of this update are meant for this rank alone, as in `no_sync`.
    """

    def __init__(
        self,
        names: Sequence[str],
        averaged: Callable[[], Collection[int]],
        is_local: Callable[[], bool],
    ) -> None:
        number = zlib.crc32("\n".join(names).encode())
        prefix = f"{_dist.attempt()}/replicas/{number}"
        _sessions[prefix] += 1
        self._prefix = f"{prefix}/{_sessions[prefix]}"
        self.averaged, self.is_local = averaged, is_local
        self._store: Any = None
        self._has_failed = False

    @property
    def rank(self) -> int:
        return _dist.rank()

    @property
    def ranks(self) -> Sequence[int]:
        return range(_dist.world())

    def post(self, key: str, rows: Rows) -> None:
        """Send rows to the first of the ranks."""
        if self.rank and self._is_open():
            with suppress(RuntimeError):
                self._store.set(f"{key}/{self.rank}", json.dumps([*rows.items()]))

    def take(self, key: str) -> Sequence[Rows] | None:
        """Return and remove what the other ranks have sent, in their order; ``None`` if not all have yet."""
        keys = [f"{key}/{rank}" for rank in self.ranks[1:]]
        if not keys or not self._is_open():
            return None
        with suppress(RuntimeError):
            if self._store.check(keys):
                found = [dict(json.loads(self._store.get(one))) for one in keys]
                for one in keys:
                    self._store.delete_key(one)
                return found
        return None

    def _is_open(self) -> bool:
        if self._store is None and not self._has_failed and _dist.world() > 1:
            try:
                self._store = _dist.own_store(self._prefix)
            except RuntimeError:
                self._has_failed = True
        return self._store is not None
