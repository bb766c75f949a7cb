"""Bounds that are part of a promise, such as an answer to hostile input within a second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds that a process may take which a test has started: to tell that it hangs, not that it is slow.
TIMEOUT = float(os.environ.get("GRADSURGEON_TEST_TIMEOUT", "600"))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail where the block takes more processor time than promised."""
    start = time.process_time()
    yield
    spent = time.process_time() - start
    # Measuring coverage costs several times what it measures; the bound is for users, who do not.
    allowed = seconds * (8.0 if sys.gettrace() is not None else 1.0)
    assert spent < allowed, f"took {spent:.2f} s of processor time, {seconds} s are promised"
