"""Says at the end of a launched script that no rule acted, where none of its processes trained anything.

Which process trains is not known beforehand: under torchrun the first one only waits for its workers.
So whoever finds a model leaves a mark, an empty file, and the first process looks for it at the end.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

# The process that was launched, and the file that tells it of what the others have found.
MAIN, MARK = "GRADSURGEON_MAIN", "GRADSURGEON_MARK"


def variables(base: Mapping[str, str]) -> dict[str, str]:
    """Return what the process that this one turns into, and its children, are to be told."""
    if base.get(MARK):
        return {}  # One launcher below another: the outer one looks.
    import tempfile  # noqa: PLC0415 # no script is to pay for it

    name = f"gradsurgeon-{os.getpid()}-{os.urandom(8).hex()}"
    return {MAIN: str(os.getpid()), MARK: os.path.join(tempfile.gettempdir(), name)}  # noqa: PTH118 # as in `start`


def start() -> None:
    """Look for the mark when this process ends, if it is the one that was launched."""
    if os.environ.get(MAIN) == str(os.getpid()) and os.environ.get(MARK):
        # Before anything else is registered: it runs last.
        atexit.register(_look)


def busy() -> None:
    """Leave the mark: there is something to train, or whoever launched has been told otherwise."""
    if mark := os.environ.get(MARK):
        with suppress(OSError), open(mark, "ab"):  # noqa: PTH123 # pathlib takes longer to import
            pass


def _look() -> None:
    if os.environ.get(MAIN) != str(os.getpid()):
        return  # a forked child
    try:
        os.unlink(os.environ[MARK])  # noqa: PTH108 # as above
    except FileNotFoundError:
        if "torch" not in sys.modules or hasattr(sys, "last_type"):
            return  # Nobody expects training, or a traceback tells why there was none.
        print(  # noqa: T201 # there is no other channel
            "gradsurgeon: no rule acted: no optimizer was built on the parameters of a module, and no backward "
            "pass reached any (torch.func, torch.autograd.grad and distributed autograd pass rules by)",
            file=sys.stderr,
            flush=True,
        )
    except (OSError, KeyError):
        pass
