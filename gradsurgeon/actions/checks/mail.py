"""Messages between ranks in the key-value store of the job. A rank posts and goes on; no rank waits for another."""

import pickle
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gradsurgeon.tensors import _dist, _job_store

# The sessions of this process so far, by rule and parameters: ranks apply theirs in one order.
_sessions: Counter[str] = Counter()


class Mail:
    """Messages of one rule of the sessions that several ranks have for the same parameters.

    Args:
        rule: the id of the rule.
        names: the parameters.
    """

    def __init__(self, rule: str, names: Sequence[str]) -> None:
        number = zlib.crc32("\n".join([rule, *names]).encode())
        prefix = f"{_job_store.attempt()}/replicas/{number}"
        _sessions[prefix] += 1
        self._prefix = f"{prefix}/{_sessions[prefix]}"
        self._opened: _job_store.OwnStore | None = None

    def post(self, key: str, message: object) -> None:
        """Leave a message; it replaces an earlier message with this key."""
        with suppress(RuntimeError):
            if (store := self._store()) is not None:
                store.set(key, pickle.dumps(message))

    def collect(self, keys: Sequence[str]) -> list[Any] | None:
        """Return and remove some messages; ``None`` unless all of them are there."""
        with suppress(RuntimeError):
            if (store := self._store()) is not None and store.check(keys):
                messages = [pickle.loads(store.get(key)) for key in keys]  # noqa: S301 # the ranks of a job trust each other
                for key in keys:
                    store.delete_key(key)
                return messages
        return None

    def _store(self) -> _job_store.OwnStore | None:
        """Return the store, ``None`` before the process group is there and after the store has ended."""
        if self._opened is None and _dist.is_used():
            self._opened = _job_store.OwnStore(self._prefix)
        if self._opened is None or not self._opened.is_served():
            return None
        return self._opened
