"""Says at the end of a launched script that no rule acted, if none of its processes trained anything.

Which process trains is not known beforehand: under torchrun the first one only waits for its workers.
So all note in a file how far they came, the status file, and who was launched reads it at the end. A command
may be anything, such as a shell, that cannot read it: `observer` does it then.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gradsurgeon.launcher import exit_code
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import DRY_RUN, STATUS_FILE, STRICT, Settings

# The process that was launched, if it can read the status file at its end.
_MAIN = "GRADSURGEON_MAIN"
# A process has taken the rules; it has imported torch; it trains something, or has said why not.
RULES_TAKEN, TORCH_IMPORTED, EXPLAINED = b"p", b"t", b"b"

# What the process that was launched has noted: it needs no file.
_noted: list[bytes] = []


def variables(base: Mapping[str, str], *, command: bool) -> dict[str, str]:
    """Return the variables for the process that this one turns into, and for its children.

    Args:
        base: the environment.
        command: it turns into something that may not be Python.
    """
    if base.get(STATUS_FILE):
        return {}  # One launcher below another: the outer one reads the file.
    import tempfile  # noqa: PLC0415 # every process of a launch imports this module, and it takes long

    name = f"gradsurgeon-{os.getpid()}-{os.urandom(8).hex()}"
    told = {STATUS_FILE: str(Path(tempfile.gettempdir()) / name)}
    return told if command else {_MAIN: str(os.getpid()), **told}


def start() -> None:
    """Note that the rules are taken, and read the status file at the end, if this process is the one to."""
    if os.environ.get(STATUS_FILE):
        note(RULES_TAKEN)
        # Before anything else is registered: it runs last.
        atexit.register(_end, os.getpid())


def note(stage: bytes) -> None:
    """Note how far this process has come, for whoever reads the status file at the end."""
    if _is_main():
        _noted.append(stage)
    elif file := os.environ.get(STATUS_FILE):
        with suppress(OSError), Path(file).open("ab") as out:
            out.write(stage)


def run_without_rules(settings: Settings, reason: str) -> None:
    """Say in one line that the rules do not get into this script, which runs on unless strict.

    Raises:
        SystemExit: with ``--strict``.
    """
    note(EXPLAINED)
    say(f"the script runs on without rules: {reason}")
    if settings.strict:
        raise SystemExit(exit_code.REFUSED) from None


def why_no_rule_acted(stages: bytes) -> str:
    """Return what is to be said of processes that came so far, nothing where all is well."""
    if EXPLAINED in stages:
        return ""
    if TORCH_IMPORTED in stages:
        return (
            "no rule acted: no optimizer of torch was built on the parameters of a module, and none of them "
            "changed between two backward passes (call gradsurgeon.apply in the script)"
        )
    if RULES_TAKEN not in stages:
        return f"no process has taken the rules: no Python of {sys.prefix} ran"
    # Nobody expects training from Python without torch, unless he says so.
    return "no rule acted: no process has imported torch" if _is_training_expected() else ""


def read_and_remove(file: str) -> bytes:
    """Return the stages that were noted in a status file, which is not needed any more."""
    try:
        stages = Path(file).read_bytes()
        Path(file).unlink()
    except OSError:
        return b""
    return stages


def _is_training_expected() -> bool:
    return any(os.environ.get(name) for name in (STRICT, DRY_RUN))


def _is_main() -> bool:
    return os.environ.get(_MAIN) == str(os.getpid())


def _end(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child
    if hasattr(sys, "last_type"):
        note(EXPLAINED)  # A traceback tells why.
    if _is_main():
        stages = b"".join(_noted) + read_and_remove(os.environ.get(STATUS_FILE, ""))
        if text := why_no_rule_acted(stages):
            say(text)
            if _is_training_expected():
                exit_code.refuse()
