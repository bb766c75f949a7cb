"""Sinks that are open, and stay so from session to session until the process ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from itertools import chain, count

from gradsurgeon.sinks.sink import Sink

_LOGGER = logging.getLogger("gradsurgeon")


class OpenSink:
    """What the sessions share that have the same sink.

    Attributes:
        failed: a session has told that it fails.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink  # while it lives, no other object has its number
        self.lock = threading.Lock()
        self.failed = False
        self.users = 0
        self.pid = os.getpid()
        self._titles: set[str] = set()

    def take_title(self, wanted: str) -> str:
        """Return what a model is called in the names of its curves: by no name that another one has now."""
        with _changing:
            names = chain([wanted], (f"model-{number}" for number in count(2)))
            title = next(name for name in names if name not in self._titles)
            self._titles.add(title)
        return title

    def leave(self, title: str | None) -> None:
        """Note that a session has it no longer, nor the title that it has taken."""
        with _changing:
            self.users -= 1
            if title is not None:
                self._titles.discard(title)


_open: dict[int, OpenSink] = {}
_changing = threading.Lock()


def enter(sink: Sink) -> OpenSink:
    """Note that one session more has the sink, until `OpenSink.leave`."""
    with _changing:
        found = _open.setdefault(id(sink), OpenSink(sink))
        found.users += 1
    return found


def close_at_end(sink: Sink) -> None:
    """Close a sink that nobody sends anything to when the process ends."""
    enter(sink).leave(None)


@atexit.register
def close_all() -> None:
    """Close the sinks that this process has used, at its end: until then another session may begin."""
    with _changing:
        ended = [one for one in _open.values() if one.pid == os.getpid() and not one.users]
        for one in ended:
            del _open[id(one.sink)]
    for one in ended:
        # Optional: only some trackers ask how the process ends.
        close_at_exit = getattr(one.sink, "close_at_exit", None)
        try:
            if close_at_exit is None:
                one.sink.close()
            else:
                close_at_exit(_uncaught())
        except Exception as error:
            if not one.failed:
                _LOGGER.exception("the sink %s could not be closed", type(one.sink).__name__)
            else:  # which has been told
                _LOGGER.info("the sink %s could not be closed: %s", type(one.sink).__name__, error)


def _uncaught() -> BaseException | None:
    """Return the exception that ends the process. What a notebook has shown of a cell has ended nothing."""
    if hasattr(sys, "ps1"):
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
