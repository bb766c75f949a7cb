"""Which start of several ranks a run belongs to: a run directory is for one, and its ranks share it.

Ranks cannot ask each other before there is a process group. They know each other by the process that
started them on their machine, and across machines by what that one has told them of the job.
"""

import json
import os
import platform
from pathlib import Path

from gradsurgeon.store.layout import RUN_FILE


def current() -> dict[str, str]:
    """Return what tells this start of ranks from others, nothing where there are no ranks."""
    if "RANK" not in os.environ:
        return {}
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return {
        "host": platform.node(),
        "parent": str(os.getppid()),
        "launch": "/".join(os.environ.get(name, "") for name in names),
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    }


def is_taken(folder: Path) -> bool:
    """Return whether a directory holds a run that is no earlier part of this job."""
    ours = current()
    if not ours:
        return (folder / RUN_FILE).exists()
    # At a later attempt it is this job that is started once more.
    return ours["attempt"] == "0" and is_of_another_start(folder)


def is_of_another_start(folder: Path) -> bool:
    """Return whether a directory holds a run of ranks that were started before these."""
    file, ours = folder / RUN_FILE, current()
    if not ours or not file.exists():
        return False
    try:
        theirs = dict(json.loads(file.read_bytes())["job"])
    except (OSError, ValueError, TypeError, KeyError):
        theirs = {}  # a run of a single process, or one that is being removed
    same = ("attempt", "parent") if theirs.get("host") == ours["host"] else ("attempt", "launch")
    return any(theirs.get(key) != ours[key] for key in same)
