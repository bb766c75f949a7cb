"""The exit code of a script that ended well by itself, and not by what it was launched for.

Python asks nobody for the code with which it ends. So the process is left at once, after all else that is
to run at exit.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

REFUSED = 2

_refusing: list[int] = []


def start() -> None:
    """Be the last that runs when this process ends."""
    # Before anything else is registered.
    atexit.register(_leave)


def refuse() -> None:
    """Let this process end with 2, unless it fails by itself."""
    _refusing.append(os.getpid())


def to_stderr(text: str) -> None:
    """Write to stderr, where there is one: a script may close it, or put nothing in its place."""
    for stream in (sys.stderr, sys.__stderr__):
        # Nothing at all would be taken for stdout, which is the script's.
        if stream is not None and not stream.closed:
            with suppress(OSError, ValueError):
                print(text, file=stream, flush=True)  # there is no other channel
            return


def code(status: int) -> int:
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
