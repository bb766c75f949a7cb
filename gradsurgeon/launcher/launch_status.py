"""Says at the end of a launch that no rule acted, if none of its processes found a model or gave another reason.

Which process trains is not known beforehand: under torchrun the first process only waits for its workers.
So the process that trains makes a file, and the launched process looks for the file at its end. A command of
another environment, such as a shell, looks for no file: such a launch says nothing.
"""

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path

from gradsurgeon.launcher.messages import say

# The path of the file; its name holds the id of the launched process.
STATUS_FILE = "GRADSURGEON_STATUS_FILE"


def variables(program: str) -> dict[str, str]:
    """Return the variable for the program that this process becomes; none for a program of another environment."""
    # The outermost of nested launchers looks for the file.
    if os.environ.get(STATUS_FILE) or Path(program).parent != Path(sys.executable).parent:
        return {}
    import tempfile  # noqa: PLC0415 # every process of a launch imports this module, and `tempfile` is slow

    name = f"gradsurgeon-{os.getpid()}-{os.urandom(8).hex()}"
    return {STATUS_FILE: str(Path(tempfile.gettempdir()) / name)}


def start() -> None:
    """Arrange for the message, if this is the launched process. Call it before other functions at exit are known."""
    file = os.environ.get(STATUS_FILE, "")
    if f"gradsurgeon-{os.getpid()}-" in file:
        atexit.register(_end, os.getpid(), Path(file))


def explain() -> None:
    """Note that rules act, or that a message said why they do not."""
    if file := os.environ.get(STATUS_FILE):
        with suppress(OSError):
            Path(file).touch()


def run_without_rules(reason: str) -> None:
    """Say in one line that this script runs on without rules."""
    explain()
    say(f"the script runs on without rules: {reason}")


def _end(pid: int, file: Path) -> None:
    if os.getpid() != pid:
        return  # a forked child
    explained = file.exists() or hasattr(sys, "last_type")  # a traceback explains, too
    file.unlink(missing_ok=True)
    if "torch" in sys.modules and not explained:
        say(
            "no rule acted: no torch optimizer was built on the parameters of a module; if the script updates weights by "
            "hand, call gradsurgeon.apply in it"
        )
