"""Messages between ranks that train replicas, through the key-value store of the job, waiting for nobody."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from gradsurgeon import _dist
from gradsurgeon.checks.base import Mail
from gradsurgeon.distributed import data_parallel
from gradsurgeon.runtime.context import Context

# The sessions of this process so far, by their parameters: ranks apply theirs in one order.
_sessions: Counter[str] = Counter()


def replica_mail(context: Context) -> Mail:
    """Return what reaches the other ranks, by a prefix that sessions with the same parameters share."""
    names = "\n".join(context.program.names)
    prefix = f"{_dist.attempt()}/replicas/{zlib.crc32(names.encode())}"
    _sessions[prefix] += 1
    return _ReplicaMail(context, f"{prefix}/{_sessions[prefix]}")


class _ReplicaMail:
    def __init__(self, context: Context, prefix: str) -> None:
        self._context, self._prefix = context, prefix
        self._store: Any = None
        self._has_failed = False

    @property
    def rank(self) -> int:
        return _dist.rank()

    @property
    def ranks(self) -> Sequence[int]:
        return range(_dist.world())

    @property
    def averaged(self) -> frozenset[int]:
        wrappers = self._context.ranks.wrappers()
        held = {id(param) for one in wrappers for param in data_parallel.averaged_by(one)}
        params = enumerate(self._context.parameters.params() if held else ())
        return frozenset(tensor for tensor, param in params if id(param) in held)

    @property
    def local(self) -> bool:
        return any(
            data_parallel.ran_alone(one) or not data_parallel.averages_plainly(one)
            for one in self._context.ranks.wrappers()
        )

    def post(self, key: str, data: bytes) -> None:
        if self.rank and self._is_open():
            with suppress(RuntimeError):
                self._store.set(f"{key}/{self.rank}", cast("Any", data))

    def take(self, key: str) -> Sequence[bytes] | None:
        keys = [f"{key}/{rank}" for rank in self.ranks[1:]]
        if not keys or not self._is_open():
            return None
        with suppress(RuntimeError):
            if self._store.check(keys):
                found = [bytes(self._store.get(one)) for one in keys]
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
