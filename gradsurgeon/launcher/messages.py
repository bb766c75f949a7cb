"""Lines on stderr, prefixed by the name of the program, that never break a progress bar of the script."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def to_stderr(text: str) -> None:
    """Write to stderr, or to Python's original stderr if the script's own accepts no text.

    A script may close or remove stderr, or replace it by an object that raises anything.
    """
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(Exception):
            # `print` would write to stdout for None. A tee need not have `closed`.
            if stream is not None and not getattr(stream, "closed", False):
                print(text, file=stream, flush=True)  # the launcher has no other channel
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
        # `external_write_mode` would also redraw bars on a redirected stdout.
        bars = [
            bar
            for bar in tqdm._instances  # noqa: SLF001 # all bars
            if hasattr(bar, "start_t") and bar.fp == sys.stderr
        ]
        for bar in bars:
            with suppress(Exception):  # its stream may be broken
                bar.clear(nolock=True)
        to_stderr(text)
        for bar in bars:
            bar.refresh(nolock=True)
