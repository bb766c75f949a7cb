"""Lines on stderr in the name of the program, never inside a progress bar of the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def to_stderr(text: str) -> None:
    """Write to stderr, where there is one: a script may close it, or put nothing in its place."""
    for stream in (sys.stderr, sys.__stderr__):
        # Nothing at all would be taken for stdout, which is the script's.
        if stream is not None and not stream.closed:
            with suppress(OSError, ValueError):
                print(text, file=stream, flush=True)  # there is no other channel
            return


def say(text: str) -> None:
    to_stderr(f"gradsurgeon: {text}")


def write(lines: Iterable[str], rank: int) -> None:
    """Write lines beside progress bars, on the first rank only."""
    if rank == 0 and (lines := list(lines)):
        with beside_progress_bars():
            to_stderr("\n".join(lines))


@contextmanager
def beside_progress_bars() -> Iterator[None]:
    """Take progress bars off the terminal for the moment, and draw them again after it."""
    module: Any = sys.modules.get("tqdm.std")
    if module is None or not getattr(module.tqdm, "_instances", ()):
        yield
        return
    with module.tqdm.get_lock():
        # `external_write_mode` would also redraw those on a stdout that goes elsewhere.
        bars = [bar for bar in module.tqdm._instances if _is_in_the_way(bar)]  # noqa: SLF001 # all there are
        for bar in bars:
            bar.clear(nolock=True)
        try:
            yield
        finally:
            for bar in bars:
                bar.refresh(nolock=True)


def _is_in_the_way(bar: Any) -> bool:
    """Return whether a progress bar is where lines on stderr go."""
    if not hasattr(bar, "start_t"):
        return False  # not drawn yet
    if bar.fp == sys.stderr:
        return True
    try:
        return os.path.sameopenfile(bar.fp.fileno(), sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        return False  # no file, such as a cell of a notebook
