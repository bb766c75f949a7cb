"""What the sinks of this package share."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

# As launchers of several ranks tell each its number, before there is a process group.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


class Client:
    """The client of a tracker. The first rank opens it at once, so that a mistake shows; the others once it is used.

    Of several ranks the first one sends: what the others opened would be runs without anything in them.

    Args:
        names: patterns, as in rule files, of tensors that get a curve each besides; a text is one pattern.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = patterns_of(names)
        self._opened: Any = None

    def _open(self) -> Any:
        raise NotImplementedError

    def _open_first(self) -> None:
        """Open it where it is going to be used; the last thing to be done when a sink is made."""
        if _is_first_rank():
            self._opened = self._open()

    @property
    def _client(self) -> Any:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the sink {type(self).__name__} cannot be sent to another process, as it has a connection or a file "
            'open: make it in that process. In Lightning, strategy="ddp" needs none to be sent, where '
            '"ddp_spawn" does'
        )


def patterns_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return patterns as they were meant: a text is one, not one for each of its letters."""
    return (names,) if isinstance(names, str) else tuple(names)


def _is_first_rank() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)
