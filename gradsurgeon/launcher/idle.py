"""Says at the end of a launched script that no rule acted, where none of its processes trained anything.

Which process trains is not known beforehand: under torchrun the first one only waits for its workers.
So all leave words in a file, the mark, and who was launched looks at them at the end. A command may be
anything, such as a shell, that cannot look: `observer` does it then.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

from gradsurgeon.launcher import exiting
from gradsurgeon.launcher.settings import DRY_RUN, STRICT

# The process that was launched, if it can look, and the file that tells it of what the others have found.
MAIN, MARK = "GRADSURGEON_MAIN", "GRADSURGEON_MARK"
# A process has taken the rules; it has imported torch; something is trained, or it was told why not.
TAKEN, TORCH, BUSY = b"p", b"t", b"b"

_own: list[bytes] = []


def start() -> None:
    """Take notice of the rules, and look for the mark when this process ends, if it is the one to."""
    if os.environ.get(MARK):
        leave(TAKEN)
        # Before anything else is registered: it runs last.
        atexit.register(_end, os.getpid())


def busy() -> None:
    """Leave word: there is something to train, or whoever launched has been told otherwise."""
    leave(BUSY)


def leave(word: bytes) -> None:
    """Leave a word for who looks at the end; who is to look itself needs no file."""
    if _is_main():
        _own.append(word)
    elif mark := os.environ.get(MARK):
        with suppress(OSError), open(mark, "ab") as file:  # noqa: PTH123 # pathlib takes longer to import
            file.write(word)


def missing(words: bytes) -> str:
    """Return what is to be said after some words were left, nothing where all is well."""
    if BUSY in words:
        return ""
    if TORCH in words:
        return (
            "no rule acted: no optimizer was built on the parameters of a module, and no backward "
            "pass reached any (torch.func, torch.autograd.grad and distributed autograd pass rules by)"
        )
    if TAKEN not in words:
        return f"no process has taken the rules: no Python of {sys.prefix} ran"
    # Nobody expects training from Python without torch, unless he says so.
    return "no rule acted: no process has imported torch" if _is_expected() else ""


def collect(mark: str) -> bytes:
    """Return the words that were left, and remove the file."""
    try:
        with open(mark, "rb") as file:  # noqa: PTH123 # as above
            words = file.read()
        os.unlink(mark)  # noqa: PTH108 # as above
    except OSError:
        return b""
    return words


def _is_expected() -> bool:
    """Tell whether it was asked for that something trains."""
    return any(os.environ.get(name) for name in (STRICT, DRY_RUN))


def _is_main() -> bool:
    return os.environ.get(MAIN) == str(os.getpid())


def _end(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child
    if hasattr(sys, "last_type"):
        busy()  # A traceback tells why.
    if _is_main():
        text = missing(b"".join(_own) + collect(os.environ.get(MARK, "")))
        if text:
            exiting.to_stderr(f"gradsurgeon: {text}")
            if _is_expected():
                exiting.refuse()
