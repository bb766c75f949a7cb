"""The key-value store that the ranks of a job share: a connection of our own, and keys under a prefix."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch

# Seconds between two looks for the keys of other ranks.
_PAUSE = 0.002
# Seconds for an answer from the host of the store.
_PATIENCE = 2.0


def store() -> Any:
    # There is no public name.
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 # see above


def _line_to(shared: Any) -> socket.socket | None:
    """Connect to the process that hosts a store over TCP; ``None`` for another store. Raises `OSError`."""
    distributed: Any = torch.distributed
    while isinstance(shared, distributed.PrefixStore):
        shared = shared.underlying_store
    if not isinstance(shared, distributed.TCPStore):
        return None
    line = socket.create_connection((shared.host, shared.port), _PATIENCE)
    line.setblocking(False)
    return line


class _Connection:
    """A connection of our own to the store of the job: a waiting request of the script does not delay ours."""

    def __init__(self, shared: Any) -> None:
        self.store: Any = None
        self._line: socket.socket | None = None
        # `clone` tries for minutes to reach a process that has ended.
        with suppress(OSError, RuntimeError):
            self._line = _line_to(shared)
            if self._line is not None:
                weakref.finalize(self, self._line.close)
            self.store = shared.clone()

    def is_served(self) -> bool:
        """Tell whether the process that hosts the store is still there."""
        # Nothing is ever sent on this line. A new connection per question would slow the host down a thousandfold.
        try:
            if self._line is not None and not self._line.recv(1, socket.MSG_PEEK):
                return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        return self.store is not None


# By store of the job: a script may destroy its process groups and make others.
_connections: weakref.WeakKeyDictionary[Any, _Connection] = weakref.WeakKeyDictionary()


def connect() -> _Connection:
    """Return our connection to the store of the job. It is made at the first call: early, while all ranks are there."""
    shared = store()
    if shared not in _connections:
        _connections[shared] = _Connection(shared)
    return _connections[shared]


class OwnStore:
    """The keys under a prefix in the store of the job. After one failed request, all requests fail at once."""

    def __init__(self, prefix: str, connection: _Connection | None = None) -> None:
        self._prefix = f"{prefix}/"
        self._connection = connection or connect()

    def at(self, prefix: str) -> Self:
        """Return the keys under another prefix, even if the script has destroyed its process groups since."""
        return type(self)(prefix, self._connection)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self._connected().timeout
        return found

    def is_served(self) -> bool:
        """Tell whether the store is still there. A failed request would write a traceback of C++ to stderr."""
        connection = self._connection
        if not connection.is_served():
            connection.store = None
        return connection.store is not None

    def set(self, key: str, value: Any) -> None:
        self._request("set", key, value)

    def get(self, key: str) -> bytes:
        """Return a value. Waits until some rank has set it."""
        found: bytes = self._request("get", key)
        return found

    def add(self, key: str, number: int) -> int:
        return int(self._request("add", key, number))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", list(keys)))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        found: bytes = self._request("compare_set", key, expected, value)
        return found

    def delete_key(self, key: str) -> None:
        self._request("delete_key", key)

    def _connected(self) -> Any:
        if (whole := self._connection.store) is None:
            raise RuntimeError("the key-value store of the job has failed before")
        return whole

    def _request(self, name: str, *args: Any) -> Any:
        distributed: Any = torch.distributed
        prefixed = distributed.PrefixStore(self._prefix, self._connected())
        try:
            return getattr(prefixed, name)(*args)
        except RuntimeError:
            self._connection.store = None
            raise


def is_hosted_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """Return a key for this attempt of a job: an agent that restarts the ranks keeps its store."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(["gradsurgeon", *(os.environ.get(name, "") for name in names)])


def server(port: int | None, limit: timedelta) -> Any:
    """Return a key-value store of this host: a new server in this process, or a client of one on a port."""
    distributed: Any = torch.distributed
    return distributed.TCPStore(
        "127.0.0.1", port or 0, None, port is None, limit, wait_for_workers=False
    )


def present(
    shared: OwnStore, ranks: Iterable[int], limit: float, *, under: str = "", until: str = ""
) -> list[int]:
    """Return the ranks that set a key of their number within some seconds, or before the key ``until`` was set."""
    missing = set(ranks)
    end = time.monotonic() + limit
    wanted = sorted(missing)
    while True:
        over = time.monotonic() >= end or (until and shared.check([until]))
        # Polled, because `wait` of the store writes to stderr when it gives up.
        missing = {rank for rank in missing if not shared.check([f"{under}{rank}"])}
        if not missing or over:
            return [rank for rank in wanted if rank not in missing]
        time.sleep(_PAUSE)
