"""`run --pdb`: the debugger, in the line of the script that a trap stopped."""

import os
import pdb  # noqa: T100 # the user asked for it
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

import gradsurgeon
from gradsurgeon import _dist
from gradsurgeon._patching import Patch
from gradsurgeon.errors import TrapError
from gradsurgeon.launcher.messages import say

_OURS = tuple(str(Path(str(package.__file__)).parent) for package in (gradsurgeon, torch))
_POLL_SECONDS = 0.2
# Restarted ranks may find the same store, so the key holds the number of the restart.
_OVER = f"gradsurgeon/debugged/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def install() -> None:
    Patch(sys, "excepthook", _on_end)


def _on_end(
    end: Callable[..., None],
    kind: type[BaseException],
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    end(kind, error, traceback)
    # The script may have raised another error from the trap's error.
    while error is not None and not isinstance(error, TrapError):
        error = error.__cause__ or error.__context__
    if error is not None and error.__traceback__ is not None:
        _debug(error, error.__traceback__)


def _debug(error: TrapError, traceback: TracebackType) -> None:
    rank = _dist.rank()
    if _dist.world() > 1 and rank != error.rank:
        say(f"rank {rank} waits: rank {error.rank} trapped and is in the debugger")
        # If the other rank hosts the store, the store ends with it.
        with suppress(RuntimeError):
            while not _dist.store().check([_OVER]):
                time.sleep(_POLL_SECONDS)
        return
    where = f"rank {rank} trapped" if _dist.world() > 1 else "the trap stopped the update"
    say(f"{where}: the debugger is in the line that took the step (`q` to quit)")
    cut_behind_the_script(traceback)
    try:
        pdb.post_mortem(traceback)
    finally:
        if _dist.world() > 1:
            _dist.store().set(_OVER, "")


def cut_behind_the_script(traceback: TracebackType) -> None:
    """Drop the last frames of a traceback, which belong to gradsurgeon and torch."""
    last = frame = traceback
    while (deeper := frame.tb_next) is not None:
        frame = deeper
        if not frame.tb_frame.f_code.co_filename.startswith(_OURS):
            last = frame
    last.tb_next = None
