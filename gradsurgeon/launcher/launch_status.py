"""Say at the end of a launch that no rule acted, if none of its processes trained anything.

Which process trains is not known beforehand: under torchrun the first process only waits for its workers.
So every process notes in a shared status file how far it came, and the launched process reads the file at
its end. A command that is not this Python, such as a shell, reads no file: there the launch says nothing.
"""

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import Settings

STATUS_FILE = "GRADSURGEON_STATUS_FILE"
# Process id of the launched process.
_MAIN = "GRADSURGEON_MAIN"
# The notes of a process: it imported torch; it trains something, or a message said why not.
TORCH_IMPORTED, EXPLAINED = b"t", b"b"

# The launched process keeps its own notes here, and needs no file.
_noted: list[bytes] = []

REFUSED = 2  # the exit code if the rules could not act
_refusing: list[int] = []  # processes that will end with it


def variables(base: Mapping[str, str], program: str) -> dict[str, str]:
    """Return the variables for the program that this process becomes."""
    if base.get(STATUS_FILE) or not _runs_this_python(program):
        return {}  # The outermost of nested launchers reads the file.
    import tempfile  # noqa: PLC0415 # every process of a launch imports this module, and `tempfile` is slow

    name = f"gradsurgeon-{os.getpid()}-{os.urandom(8).hex()}"
    return {_MAIN: str(os.getpid()), STATUS_FILE: str(Path(tempfile.gettempdir()) / name)}


def _runs_this_python(program: str) -> bool:
    """Tell whether a program is this interpreter, or a script of its environment such as torchrun."""
    folder = Path(sys.executable).parent
    if Path(program).parent == folder and Path(program).name.startswith("python"):
        return True
    with suppress(OSError), Path(program).open("rb") as file:
        head = file.read(512)
        return head.startswith(b"#!") and os.fsencode(folder / "python") in head
    return False


def start(settings: Settings) -> None:
    """Arrange for the message and the exit code at the end of this process."""
    # Registered before any other function, so they run last.
    atexit.register(_leave)
    if os.environ.get(STATUS_FILE):
        atexit.register(_end, os.getpid(), settings.strict or bool(settings.dry_run))


def note(stage: bytes) -> None:
    """Note how far this process came."""
    if _is_main():
        _noted.append(stage)
    elif file := os.environ.get(STATUS_FILE):
        with suppress(OSError), Path(file).open("ab") as out:
            out.write(stage)


def run_without_rules(settings: Settings, reason: str) -> None:
    """Say in one line that this script gets no rules; it runs on unless the launch is strict."""
    note(EXPLAINED)
    say(f"the script runs on without rules: {reason}")
    if settings.strict:
        raise SystemExit(REFUSED) from None


def _is_main() -> bool:
    return os.environ.get(_MAIN) == str(os.getpid())


def _end(pid: int, training_expected: bool) -> None:  # noqa: FBT001 # `atexit` hands it on
    if os.getpid() != pid:
        return  # a forked child
    if hasattr(sys, "last_type"):
        note(EXPLAINED)  # by a traceback
    if not _is_main():
        return
    stages = b"".join(_noted)
    with suppress(OSError):
        file = Path(os.environ[STATUS_FILE])
        stages += file.read_bytes()
        file.unlink()
    if EXPLAINED in stages:
        return
    if TORCH_IMPORTED in stages:
        say(
            "no rule acted: no torch optimizer was built on the parameters of a module, and no parameter changed "
            "between two backward passes (call gradsurgeon.apply in the script)"
        )
    elif training_expected:
        say("no rule acted: no process imported torch")
    if training_expected:
        refuse()


def refuse() -> None:
    """Make this process end with exit code 2, unless it fails by itself."""
    _refusing.append(os.getpid())


def exit_code_for(status: int) -> int:
    """Return the exit code of a process that would end with ``status``."""
    return REFUSED if status == 0 and os.getpid() in _refusing else status


def _leave() -> None:
    # After the script, Python accepts no other exit code. So this function ends the process, after all
    # other functions at exit. A traceback has an exit code of its own.
    if os.getpid() not in _refusing or hasattr(sys, "last_type"):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have replaced the stream
            stream.flush()
    os._exit(REFUSED)
