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
    if getattr(tqdm, "_instances", ()):
        with suppress(Exception):  # the stream of a bar may be broken
            tqdm.write(text, file=sys.stderr)
            return
    to_stderr(text)
