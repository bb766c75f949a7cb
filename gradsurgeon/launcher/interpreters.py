"""Which Python will run a script or a command, and whether the rules can get into it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

_LONGEST_LINE = 4096
_PATIENCE_SECONDS = 10


def blocking_flag() -> str:
    """Return the flag of this interpreter, handed on to scripts, with which rules cannot get in."""
    flags = sys.flags
    given = {"-I": flags.isolated, "-E": flags.ignore_environment, "-S": flags.no_site}
    return next((flag for flag, on in given.items() if on), "")


def other_prefix(program: str) -> str:
    """Return the prefix of another Python that runs a command, empty where it is this one, or none."""
    interpreter = _interpreter(program)
    path = Path(interpreter)
    if not path.name.startswith("python") or path.parent == Path(sys.executable).parent:
        return ""
    try:
        answer = subprocess.run(  # noqa: S603 # it is about to be run anyway
            [interpreter, "-I", "-c", "import sys; print(sys.prefix)"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # Whatever is wrong with it, it will say so itself.
    prefix = answer.stdout.strip()
    return "" if prefix == sys.prefix else prefix


def _interpreter(program: str) -> str:
    """Return what runs a program: what its first line names, or itself."""
    try:
        with Path(program).open("rb") as file:
            first = file.readline(_LONGEST_LINE)
    except OSError:
        return program
    if not first.startswith(b"#!"):
        return program
    words = shlex.split(os.fsdecode(first[2:]))
    if words and Path(words[0]).name == "env":
        words = [shutil.which(word) or "" for word in words[1:] if not word.startswith("-")]
    return words[0] if words else program
