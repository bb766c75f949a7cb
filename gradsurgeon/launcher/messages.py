"""Lines on stderr in the name of the program, never inside a progress bar of the script."""

import sys
from collections.abc import Iterable
from contextlib import suppress
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
    text = "\n".join(lines)
    if rank != 0 or not text:
        return
    tqdm: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if not getattr(tqdm, "_instances", ()):
        to_stderr(text)
        return
    with tqdm.get_lock():
        # `external_write_mode` would also redraw those on a stdout that goes elsewhere.
        bars = [
            bar
            for bar in tqdm._instances  # noqa: SLF001 # all there are
            if hasattr(bar, "start_t") and bar.fp == sys.stderr
        ]
        for bar in bars:
            bar.clear(nolock=True)
        to_stderr(text)
        for bar in bars:
            bar.refresh(nolock=True)
