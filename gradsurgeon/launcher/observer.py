"""A small process that waits for the end of a command, which may be anything, and says if no rule acted.

The launcher turns into the command, so that signals and exit code are those of the command. What comes
after its end is left to another process: no child of the command, which may wait for any of its own.
"""

import os
import select
from collections.abc import Mapping
from typing import NoReturn

from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import STATUS_FILE


def start(environment: Mapping[str, str]) -> None:
    """Leave a process behind that waits for the end of this one, whatever it turns into."""
    try:
        # By its number alone it might be another process by then.
        end = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return  # Only Linux has them.
    between = os.fork()
    if between == 0:
        try:
            os.setsid()  # What the terminal sends is for the command.
            if os.fork() == 0:
                os.environ.update(environment)
                _observe(end)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    os.close(end)


def _observe(end: int) -> NoReturn:
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    # Whoever reads what the command writes is not to wait for this process.
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.dup2(end, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    select.select([3], [], [])
    stages = launch_status.read_and_remove(os.environ[STATUS_FILE])
    if text := launch_status.why_no_rule_acted(stages):
        say(text)
    os._exit(0)
