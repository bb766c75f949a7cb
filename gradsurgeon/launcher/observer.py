"""A small process that waits for the end of a command, which may be anything, and says what it has missed.

The launcher turns into the command, so that signals and exit code are those of the command. What comes
after its end is left to another process: no child of the command, which may wait for any of its own.
"""

from __future__ import annotations

import os
import select
import time
from typing import NoReturn

from gradsurgeon.launcher import idle
from gradsurgeon.launcher.importing import say
from gradsurgeon.launcher.mark import is_alive

_POLL_SECONDS = 0.2


def start(mark: str) -> None:
    """Leave a process behind that waits for the end of this one, whatever it turns into.

    Args:
        mark: the file in which the processes of the command leave word.
    """
    own = os.getpid()
    ended = _handle(own)
    between = os.fork()
    if between == 0:
        try:
            os.setsid()  # What the terminal sends is for the command.
            if os.fork() == 0:
                _observe(own, ended, mark)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    if ended != -1:
        os.close(ended)


def _handle(pid: int) -> int:
    """Return a file that can be read once a process has ended, -1 where the system has none."""
    try:
        # By its number alone it might be another process by then.
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _observe(pid: int, ended: int, mark: str) -> NoReturn:
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    # Whoever reads what the command writes is not to wait for this process.
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    most = os.sysconf("SC_OPEN_MAX")
    if ended == -1:
        os.closerange(3, most)
        while is_alive(pid):
            time.sleep(_POLL_SECONDS)
    else:
        os.closerange(3, ended)
        os.closerange(ended + 1, most)
        waiting = select.poll()
        waiting.register(ended, select.POLLIN)
        waiting.poll()
    look(mark)
    os._exit(0)


def look(mark: str) -> None:
    """Say what is missing now that a command has ended."""
    if text := idle.missing(idle.collect(mark)):
        say(text)
