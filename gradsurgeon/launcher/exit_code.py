"""Ends a process with 2 where the script itself ended well, but its rules could not act.

Python lets nobody change the exit code once the script has ended. So the process is left at once, after
everything else that runs at exit.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

REFUSED = 2

_refusing: list[int] = []


def install() -> None:
    """Be the last that runs when this process ends, by being the first to register."""
    atexit.register(_leave)


def refuse() -> None:
    """Let this process end with 2, unless it fails by itself."""
    _refusing.append(os.getpid())


def instead_of(status: int) -> int:
    """Return the exit code of a process that would end with ``status``."""
    return REFUSED if status == 0 and os.getpid() in _refusing else status


def _leave() -> None:
    # A traceback has a code of its own.
    if os.getpid() not in _refusing or hasattr(sys, "last_type"):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(REFUSED)
