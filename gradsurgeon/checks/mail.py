"""Messages between ranks in the key-value store of the job. A rank posts and goes on; no rank waits for another."""

import pickle
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from gradsurgeon import _dist

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
        prefix = f"{_dist.attempt()}/replicas/{number}"
        _sessions[prefix] += 1
        self._prefix = f"{prefix}/{_sessions[prefix]}"
        self._store: Any = None
        # The rank that hosts the store may have ended. Each further call would fail as well.
        self._has_failed = False

    def post(self, key: str, message: object) -> None:
        """Leave a message; it replaces an earlier message with this key."""
        if self._is_open():
            with self._noting_failure():
                self._store.set(key, cast("Any", pickle.dumps(message)))

    def take(self, keys: Sequence[str]) -> list[Any] | None:
        """Return and remove some messages; ``None`` unless all of them are there."""
        if not self._is_open():
            return None
        with self._noting_failure():
            if self._store.check(keys):
                messages = [pickle.loads(self._store.get(key)) for key in keys]  # noqa: S301 # the ranks of a job trust each other
                for key in keys:
                    self._store.delete_key(key)
                return messages
        return None

    def _is_open(self) -> bool:
        if self._has_failed or not _dist.has_store():
            return False
        if self._store is None and _dist.is_used():
            with self._noting_failure():
                # If the host of the store has ended, a new connection would wait for it for minutes. The connection
                # of the script fails at once.
                _dist.store().check([self._prefix])
                self._store = _dist.own_store(self._prefix)
        return self._store is not None

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self._has_failed = True
