"""Says at the end of a launched script that no rule acted, if none of its processes trained anything.

Which process trains is not known beforehand: under torchrun the first one only waits for its workers.
So all note in a file how far they came, the status file, and who was launched reads it at the end.

A command may be anything, such as a shell, that cannot read it. The launcher turns into it, so that signals and
exit code are those of the command; another process waits for its end, and is no child of the command, which may
wait for any of its own.
"""

import atexit
import os
import select
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import DRY_RUN, STATUS_FILE, STRICT, Settings

# The process that was launched, if it can read the status file at its end.
_MAIN = "GRADSURGEON_MAIN"
# A process has taken the rules; it has imported torch; it trains something, or has said why not.
RULES_TAKEN, TORCH_IMPORTED, EXPLAINED = b"p", b"t", b"b"

# What the process that was launched has noted: it needs no file.
_noted: list[bytes] = []

REFUSED = 2  # the exit code where the rules could not act
_refusing: list[int] = []  # processes that are to end with it


def variables(base: Mapping[str, str], *, command: bool) -> dict[str, str]:
    """Return the variables for what this process turns into; a ``command`` may not be Python."""
    if base.get(STATUS_FILE):
        return {}  # One launcher below another: the outer one reads the file.
    import tempfile  # noqa: PLC0415 # every process of a launch imports this module, and it takes long

    name = f"gradsurgeon-{os.getpid()}-{os.urandom(8).hex()}"
    told = {STATUS_FILE: str(Path(tempfile.gettempdir()) / name)}
    return told if command else {_MAIN: str(os.getpid()), **told}


def start() -> None:
    # Before anything else is registered: they run last.
    atexit.register(_leave)
    if os.environ.get(STATUS_FILE):
        note(RULES_TAKEN)
        atexit.register(_end, os.getpid())


def note(stage: bytes) -> None:
    if _is_main():
        _noted.append(stage)
    elif file := os.environ.get(STATUS_FILE):
        with suppress(OSError), Path(file).open("ab") as out:
            out.write(stage)


def run_without_rules(settings: Settings, reason: str) -> None:
    """Say in one line that the rules do not get into this script, which runs on unless strict."""
    note(EXPLAINED)
    say(f"the script runs on without rules: {reason}")
    if settings.strict:
        raise SystemExit(REFUSED) from None


def why_no_rule_acted(stages: bytes) -> str:
    if EXPLAINED in stages:
        return ""
    if TORCH_IMPORTED in stages:
        return (
            "no rule acted: no optimizer of torch was built on the parameters of a module, and none of them "
            "changed between two backward passes (call gradsurgeon.apply in the script)"
        )
    if RULES_TAKEN not in stages:
        return f"no process has taken the rules: no Python of {sys.prefix} ran"
    # Nobody expects training from Python without torch, unless he says so.
    return "no rule acted: no process has imported torch" if _is_training_expected() else ""


def read_and_remove(file: str) -> bytes:
    try:
        stages = Path(file).read_bytes()
        Path(file).unlink()
    except OSError:
        return b""
    return stages


def _is_training_expected() -> bool:
    return any(os.environ.get(name) for name in (STRICT, DRY_RUN))


def _is_main() -> bool:
    return os.environ.get(_MAIN) == str(os.getpid())


def _end(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child
    if hasattr(sys, "last_type"):
        note(EXPLAINED)  # A traceback tells why.
    if _is_main():
        stages = b"".join(_noted) + read_and_remove(os.environ.get(STATUS_FILE, ""))
        if text := why_no_rule_acted(stages):
            say(text)
            if _is_training_expected():
                refuse()


def refuse() -> None:
    """Let this process end with 2, unless it fails by itself."""
    _refusing.append(os.getpid())


def exit_code_for(status: int) -> int:
    """Return the exit code of a process that would end with ``status``."""
    return REFUSED if status == 0 and os.getpid() in _refusing else status


def _leave() -> None:
    # Python lets nobody change the exit code once the script has ended: the process is left at once, after
    # everything else that runs at exit. A traceback has a code of its own.
    if os.getpid() not in _refusing or hasattr(sys, "last_type"):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # whatever the script has put there
            stream.flush()
    os._exit(REFUSED)


def leave_observer(environment: Mapping[str, str]) -> None:
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
    stages = read_and_remove(os.environ[STATUS_FILE])
    if text := why_no_rule_acted(stages):
        say(text)
    os._exit(0)
