"""A small process that waits for the end of a command, which may be anything, and says if no rule acted.

The launcher turns into the command, so that signals and exit code are those of the command. What comes
after its end is left to another process: no child of the command, which may wait for any of its own.
"""

from __future__ import annotations

import os
import select
import time
from typing import NoReturn

from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.messages import say

_POLL_SECONDS = 0.2


def start(status_file: str) -> None:
    """Leave a process behind that waits for the end of this one, whatever it turns into."""
    pid = os.getpid()
    end_of_pid = _readable_at_the_end(pid)
    between = os.fork()
    if between == 0:
        try:
            os.setsid()  # What the terminal sends is for the command.
            if os.fork() == 0:
                _observe(pid, end_of_pid, status_file)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    if end_of_pid != -1:
        os.close(end_of_pid)


def _readable_at_the_end(pid: int) -> int:
    """Return a file that can be read once a process has ended, -1 where the system has none."""
    try:
        # By its number alone it might be another process by then.
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _observe(pid: int, end_of_pid: int, status_file: str) -> NoReturn:
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    # Whoever reads what the command writes is not to wait for this process.
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    most = os.sysconf("SC_OPEN_MAX")
    if end_of_pid == -1:
        os.closerange(3, most)
        while launch_status.is_alive(pid):
            time.sleep(_POLL_SECONDS)
    else:
        os.closerange(3, end_of_pid)
        os.closerange(end_of_pid + 1, most)
        poll = select.poll()
        poll.register(end_of_pid, select.POLLIN)
        poll.poll()
    report(status_file)
    os._exit(0)


def report(status_file: str) -> None:
    """Say why no rule acted, now that a command has ended."""
    if text := launch_status.why_no_rule_acted(launch_status.read_and_remove(status_file)):
        say(text)
