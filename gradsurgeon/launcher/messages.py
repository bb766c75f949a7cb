"""Lines on stderr in the name of the program, never inside a progress bar of the script."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def to_stderr(text: str) -> None:
    """Write to stderr, or to the stderr that Python began with if the script's own takes no text.

    A script may close stderr, remove it, or replace it by any object, which may raise anything.
    """
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(Exception):
            # `print` takes None for stdout, which is the script's. A tee need not have `closed`.
            if stream is not None and not getattr(stream, "closed", False):
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
    with suppress(Exception), tqdm.get_lock():
        # `external_write_mode` would also redraw those on a stdout that goes elsewhere.
        bars = [
            bar
            for bar in tqdm._instances  # noqa: SLF001 # all there are
            if hasattr(bar, "start_t") and bar.fp == sys.stderr
        ]
        for bar in bars:
            with suppress(Exception):  # its stream may be broken
                bar.clear(nolock=True)
        to_stderr(text)
        for bar in bars:
            bar.refresh(nolock=True)
