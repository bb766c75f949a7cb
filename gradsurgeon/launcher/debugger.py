"""`run --pdb`: the debugger, in the line of the script that a trap has stopped."""

from __future__ import annotations

import multiprocessing
import os
import pdb  # noqa: T100 # it is what was asked for
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import gradsurgeon
from gradsurgeon import _dist
from gradsurgeon._patching import Patch
from gradsurgeon.errors import NonFiniteGradientError, printable
from gradsurgeon.launcher.messages import say

_OURS = tuple(str(Path(str(package.__file__)).parent) for package in (gradsurgeon, torch))
_POLL_SECONDS = 0.2
# Ranks that are started again may find the same store.
_OVER = f"gradsurgeon/debugged/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class Debugger:
    """Opens after a trap has ended the script, once the traceback is printed."""

    def __init__(self) -> None:
        # The last error of a trap of this rank that nobody has looked at.
        self._unseen = ""

    def install(self) -> None:
        """Wait for the error of a trap, in whatever thread."""
        Patch(NonFiniteGradientError, "__init__", self._construct)
        Patch(sys, "excepthook", self._on_end)
        Patch(threading, "excepthook", self._on_end_of_thread)

    def _construct(
        self,
        construct: Callable[..., None],
        error: NonFiniteGradientError,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        construct(error, *args, **kwargs)
        if error.rank == _dist.rank():
            self._unseen = str(error).partition("\n")[0]

    def _on_end(
        self,
        end: Callable[..., None],
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        end(kind, error, traceback)
        self._attend(error)

    def _on_end_of_thread(
        self, end: Callable[[threading.ExceptHookArgs], None], args: threading.ExceptHookArgs
    ) -> None:
        end(args)
        self._attend(args.exc_value)

    def _attend(self, error: BaseException | None) -> None:
        # The script may have raised another error from that of the trap.
        while error is not None and not isinstance(error, NonFiniteGradientError):
            error = error.__cause__ or error.__context__
        if error is not None and error.__traceback__ is not None:
            self._unseen = ""
            debug(error, error.__traceback__)

    def say_what_was_missed(self) -> None:
        """Say at the end that a trap has stopped an update, and why there was no debugger."""
        if self._unseen:
            child = multiprocessing.parent_process() is not None
            why = (
                "a process that multiprocessing starts reads no input: train in the first one"
                if child
                else "the script caught the error: let it pass"
            )
            say(f"no debugger was opened at {printable(self._unseen)}")
            say(f"  {why}")


def debug(error: NonFiniteGradientError, traceback: TracebackType) -> None:
    """Open the debugger on the rank that trapped; let the others wait for it."""
    rank = _dist.rank()
    if _dist.world() > 1 and rank != error.rank:
        say(f"rank {rank} waits: rank {error.rank} trapped and is in the debugger")
        # Where the other rank kept the store, it has ended with it.
        with suppress(RuntimeError):
            while not _dist.store().check([_OVER]):
                time.sleep(_POLL_SECONDS)
        return
    where = f"rank {rank} trapped" if _dist.world() > 1 else "the trap stopped the update"
    say(f"{where}: the debugger is in the line that took the step (`q` to quit)")
    try:
        pdb.post_mortem(_until_the_script(traceback))
    finally:
        if _dist.world() > 1:
            _dist.store().set(_OVER, "")


def _until_the_script(traceback: TracebackType) -> TracebackType:
    """Return a traceback without its last frames, which are ours and torch's."""
    frames = [traceback]
    while (deeper := frames[-1].tb_next) is not None:
        frames.append(deeper)
    while len(frames) > 1 and frames[-1].tb_frame.f_code.co_filename.startswith(_OURS):
        frames.pop()
    shortened: TracebackType | None = None
    for frame in reversed(frames):
        shortened = TracebackType(shortened, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shortened or traceback
