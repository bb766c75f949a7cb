"""Lines of the launcher on stderr, which never break a progress bar, and a line at the end if no rule acted.

Under torchrun the first process only waits for its workers. So a process that trains makes a file, and the launched
process looks for the file at its end; a command of another environment, such as a shell, does not.
"""

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsurgeon.errors import to_stderr

# The path of the file; its name holds the id of the launched process.
STATUS_FILE = "GRADSURGEON_STATUS_FILE"


def say(text: str) -> None:
    to_stderr(f"gradsurgeon: {text}")


def write(lines: Iterable[str], rank: int) -> None:
    text = "\n".join(lines)
    if rank != 0 or not text:
        return
    tqdm: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    with suppress(Exception):
        # `tqdm.write` also draws bars again that are on a redirected stdout.
        if any(bar.fp == sys.stderr for bar in list(tqdm._instances)):  # noqa: SLF001 # all bars
            tqdm.write(text, file=sys.stderr)
            return
    to_stderr(text)


def variables(program: str) -> dict[str, str]:
    """Return the variable for the program that this process becomes; none for a program of another environment."""
    # The outermost of nested launchers looks for the file.
    if os.environ.get(STATUS_FILE) or Path(program).parent != Path(sys.executable).parent:
        return {}
    import tempfile  # noqa: PLC0415 # every process of a launch imports this module, and `tempfile` is slow

    name = f"gradsurgeon-{os.getpid()}-{os.urandom(8).hex()}"
    return {STATUS_FILE: str(Path(tempfile.gettempdir()) / name)}


def start(*, dry_run: bool) -> None:
    """Arrange for the message, if this is the launched process. Call it before other functions at exit are known."""
    file = os.environ.get(STATUS_FILE, "")
    if f"gradsurgeon-{os.getpid()}-" in file:
        atexit.register(_end, os.getpid(), Path(file), dry_run=dry_run)


def explain() -> None:
    """Note that rules act, or that a message said why they do not."""
    file = os.environ.get(STATUS_FILE)
    if file:
        with suppress(OSError):
            Path(file).touch()


def _end(pid: int, file: Path, *, dry_run: bool) -> None:
    if os.getpid() != pid:
        return  # a forked child
    has_traceback = hasattr(sys, "last_type")  # which explains, too
    explained = has_traceback or file.exists()
    file.unlink(missing_ok=True)
    if explained:
        return
    if "torch" in sys.modules:
        say(
            "no rule acted: no torch optimizer was built on the parameters of a module; if the script updates weights by "
            "hand, call gradsurgeon.apply in it"
        )
    elif dry_run:
        # A script that only starts others may end without a message, but here a plan was asked for.
        say("no rule acted: the script did not import torch, so there is no plan")
