"""Names the file in which the processes of a launch leave word, and clears away those of earlier ones."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gradsurgeon.launcher.idle import MAIN, MARK

_NAME = re.compile(r"gradsurgeon-(\d+)-[0-9a-f]{16}")
_STALE_SECONDS = 24 * 60 * 60


def variables(base: Mapping[str, str], *, command: bool) -> dict[str, str]:
    """Return what the process that this one turns into, and its children, are to be told.

    Args:
        base: the environment.
        command: it turns into something that may not be Python.
    """
    if base.get(MARK):
        return {}  # One launcher below another: the outer one looks.
    folder = Path(tempfile.gettempdir())
    if os.name != "nt":
        _sweep(folder)
    mark = {MARK: str(folder / f"gradsurgeon-{os.getpid()}-{os.urandom(8).hex()}")}
    return mark if command else {MAIN: str(os.getpid()), **mark}


def _sweep(folder: Path) -> None:
    """Remove marks of this user whose process was killed, so that nobody has looked at them."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is not None and not is_alive(int(found[1])):
                with suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    # What cannot be seen from here may be alive in another container.
                    if (
                        about.st_uid == os.getuid()
                        and time.time() - about.st_mtime > _STALE_SECONDS
                    ):
                        Path(entry.path).unlink()


def is_alive(pid: int) -> bool:
    """Tell whether there is a process of this number, be it somebody else's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's
    return True
