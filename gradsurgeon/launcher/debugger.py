"""`run --pdb`: the debugger, in the line of the script that a trap has stopped."""

from __future__ import annotations

import os
import pdb  # noqa: T100 # it is what was asked for
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import torch

import gradsurgeon
from gradsurgeon import _dist
from gradsurgeon.errors import NonFiniteGradientError
from gradsurgeon.launcher.importing import say

_OURS = tuple(str(Path(str(package.__file__)).parent) for package in (gradsurgeon, torch))
_POLL_SECONDS = 0.2


def install() -> None:
    """Open the debugger after a trap has ended the script, once the traceback is printed."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        if isinstance(error, NonFiniteGradientError) and traceback is not None:
            debug(error, traceback)

    sys.excepthook = hook


def debug(error: NonFiniteGradientError, traceback: TracebackType) -> None:
    """Open the debugger on the rank that trapped; let the others wait for it."""
    own = _dist.rank()
    done = _marker()
    if _dist.world() > 1 and own != error.rank:
        say(f"rank {own} waits: rank {error.rank} trapped and is in the debugger")
        while not done.exists():
            time.sleep(_POLL_SECONDS)
        return
    where = f"rank {own} trapped" if _dist.world() > 1 else "the trap stopped the update"
    say(f"{where}: the debugger is in the line that took the step (`q` to quit)")
    try:
        pdb.post_mortem(_until_the_script(traceback))
    finally:
        if _dist.world() > 1:
            done.touch()


def _until_the_script(traceback: TracebackType) -> TracebackType:
    """Return a traceback without its last frames, which are ours and torch's."""
    frames = []
    one: TracebackType | None = traceback
    while one is not None:
        frames.append(one)
        one = one.tb_next
    while len(frames) > 1 and frames[-1].tb_frame.f_code.co_filename.startswith(_OURS):
        frames.pop()
    found: TracebackType | None = None
    for frame in reversed(frames):
        found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found or traceback


def _marker() -> Path:
    # All ranks on a machine have the same parent and the same port.
    job = f"{os.getppid()}-{os.environ.get('MASTER_PORT', '')}"
    return Path(tempfile.gettempdir()) / f"gradsurgeon-pdb-{job}"
