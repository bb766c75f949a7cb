"""Which start of several ranks a run belongs to: a run directory is for one, and its ranks share it.

Ranks cannot ask each other before there is a process group. They know each other by the process that
started them on their machine, and across machines by what that one has told them of the job.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

from gradsurgeon.store.layout import RUN_FILE

# Ranks on other machines begin to record within this time, which takes a rank that imports torch seconds.
_TOGETHER_SECONDS = 60.0


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
    file, ours = folder / RUN_FILE, current()
    if not file.exists() or not ours:
        return file.exists()
    if ours["attempt"] != "0":
        return False  # It is this job that is started once more.
    theirs = _read_job(file)
    if theirs.get("host") == ours["host"]:
        return theirs.get("parent") != ours["parent"]
    return theirs.get("launch") != ours["launch"] or _age(file) > _TOGETHER_SECONDS


def is_of_another_start(folder: Path) -> bool:
    """Return whether a directory holds a run of ranks that were started before these."""
    file, ours = folder / RUN_FILE, current()
    if not ours or not file.exists():
        return False
    theirs = _read_job(file)
    same = ("attempt", "parent") if theirs.get("host") == ours["host"] else ("attempt", "launch")
    return any(theirs.get(key) != ours[key] for key in same)


def _read_job(file: Path) -> dict[str, str]:
    try:
        job = json.loads(file.read_text(encoding="utf-8")).get("job")
    except (OSError, ValueError, AttributeError):
        return {}
    return job if isinstance(job, dict) else {}


def _age(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return 0.0
