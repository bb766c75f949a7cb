"""The key-value store that the ranks of a job share: a connection of our own."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from gradsurgeon.tensors import _dist

_distributed: Any = torch.distributed  # has no types
# Seconds for an answer from the host of the store.
_PATIENCE = 2.0
_ENDED = "the process that hosts it has ended, or an earlier request has failed"


def store() -> Any:
    # There is no public name.
    return _distributed.distributed_c10d._get_default_store()  # noqa: SLF001 # see above


class Connection:
    """A connection of our own to the store of the job: a waiting request of the script does not delay ours."""

    def __init__(self, shared: Any) -> None:
        self.store: Any = None
        # The process group may be gone when a session ends.
        self.rank = _dist.rank()
        self._line: socket.socket | None = None
        # `clone` tries for minutes to reach a process that has ended.
        with suppress(OSError, RuntimeError):
            inner = shared
            while isinstance(inner, _distributed.PrefixStore):
                inner = inner.underlying_store
            if isinstance(inner, _distributed.TCPStore):
                address = (inner.host, inner.port)
                self._line = socket.create_connection(address, _PATIENCE)
                self._line.setblocking(False)
                weakref.finalize(self, self._line.close)
            self.store = shared.clone()

    def request(self, prefix: str, name: str, *args: Any) -> Any:
        """Call a method of the store on keys under a prefix. After one failed request, all requests fail at once."""
        # A request to a host that has ended writes a traceback of C++ to stderr.
        if not self._is_served():
            self.store = None
            raise _distributed.DistNetworkError(_ENDED)
        try:
            return getattr(_distributed.PrefixStore(prefix, self.store), name)(*args)
        except RuntimeError:
            self.store = None
            raise

    def _is_served(self) -> bool:
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
_connections = weakref.WeakKeyDictionary[Any, Connection]()


def connect() -> Connection:
    """Return our connection to the store of the job. It is made at the first call: early, while all ranks are there."""
    shared = store()
    if shared not in _connections:
        _connections[shared] = Connection(shared)
    return _connections[shared]


def is_hosted_here() -> bool:
    """Tell whether this process hosts the store of the job, and no agent does."""
    return _dist.rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def attempt() -> str:
    """Return a key for this attempt of a job: an agent that restarts the ranks keeps its store."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"gradsurgeon/{run}/{restarts}"


def server(port: int | None, limit: timedelta) -> Any:
    """Return a key-value store of this host: a new server in this process, or a client of one on a port."""
    is_server = port is None
    if port is None:
        port = 0  # any free port
    return _distributed.TCPStore("127.0.0.1", port, None, is_server, limit, wait_for_workers=False)
