"""Sinks that are open. They stay so from session to session, until the process ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from itertools import chain, count

from gradsurgeon.sinks.sink import Sink

_LOGGER = logging.getLogger("gradsurgeon")


class OpenSink:
    """A sink that several sessions may use, each with a title of its own.

    Attributes:
        lock: held by the session that calls the sink.
        failed: a session has reported that the sink fails.
        titles: the title of each session in the names of its curves, ``None`` before it begins.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink  # while it lives, no other object has its number
        self.lock = threading.Lock()
        self.failed = False
        self.pid = os.getpid()
        self.titles: weakref.WeakKeyDictionary[object, str | None] = weakref.WeakKeyDictionary()

    def enter(self, session: object) -> None:
        """Note that a session uses the sink, until it calls `leave`."""
        with _changing:
            self.titles[session] = None

    def take_title(self, session: object, wanted: str) -> str:
        """Return the wanted title, or ``model-2`` and so on if another session has it now."""
        with _changing:
            names = chain([wanted], (f"model-{number}" for number in count(2)))
            taken = set(self.titles.values())
            title = next(name for name in names if name not in taken)
            self.titles[session] = title
        return title

    def leave(self, session: object) -> None:
        """Note that a session uses the sink no longer. A second call does nothing."""
        with _changing:
            self.titles.pop(session, None)


_open: dict[int, OpenSink] = {}
_changing = threading.Lock()


def opened(sink: Sink) -> OpenSink:
    """Return the one object of a sink, which is closed when the process ends."""
    with _changing:
        return _open.setdefault(id(sink), OpenSink(sink))


@atexit.register
def close_all() -> None:
    """Close the sinks that this process has opened and that no session uses. Until then a session may begin."""
    with _changing:
        ended = [one for one in _open.values() if one.pid == os.getpid() and not one.titles]
        for one in ended:
            del _open[id(one.sink)]
    # In a notebook an exception ends only a cell.
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for one in ended:
        # Optional: only some trackers ask how the process ends.
        close_at_exit = getattr(one.sink, "close_at_exit", None)
        try:
            if close_at_exit is None:
                one.sink.close()
            else:
                close_at_exit(uncaught)
        except Exception as error:
            if not one.failed:
                _LOGGER.exception("the sink %s could not be closed", type(one.sink).__name__)
            else:  # an event has reported it
                _LOGGER.info("the sink %s could not be closed: %s", type(one.sink).__name__, error)
