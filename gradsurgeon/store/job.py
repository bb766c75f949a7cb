"""The start of several ranks that a run belongs to, by their parent process or environment, before a process group."""

import json
import os
import platform
from pathlib import Path

from gradsurgeon.store.layout import RUN_FILE


def current() -> dict[str, str]:
    """Return what identifies this start of ranks, nothing if there are no ranks."""
    if "RANK" not in os.environ:
        return {}
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return {
        "host": platform.node(),
        "parent": str(os.getppid()),
        "launch": "/".join(os.environ.get(name, "") for name in names),
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    }


def world() -> int:
    """Return the number of ranks that were started together, 1 of a process that was started alone."""
    number = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(number) if number.isdecimal() else 1


def is_taken(folder: Path) -> bool:
    """Return whether a directory holds a run of another job."""
    ours = current()
    if not ours:
        return (folder / RUN_FILE).exists()
    # A later attempt is a restart of this job.
    return ours["attempt"] == "0" and is_of_another_start(folder)


def is_of_another_start(folder: Path) -> bool:
    """Return whether a directory holds a run of an earlier start of ranks."""
    file, ours = folder / RUN_FILE, current()
    if not ours or not file.exists():
        return False
    try:
        theirs = dict(json.loads(file.read_bytes())["job"])
    except (OSError, ValueError, TypeError, KeyError):
        theirs = {}  # a run of a single process, or one that is being removed
    same = ("attempt", "parent") if theirs.get("host") == ours["host"] else ("attempt", "launch")
    return any(theirs.get(key) != ours[key] for key in same)
