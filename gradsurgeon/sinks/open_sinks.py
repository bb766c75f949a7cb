"""Sinks that are open. They stay so from session to session, until the process ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

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
        self.titles: dict[object, str | None] = {}

    def take_title(self, session: object, title: str) -> str:
        """Return the title, or ``model-2`` and so on if another session has it now."""
        with _changing:
            number = 1
            while title in self.titles.values():
                number += 1
                title = f"model-{number}"
            self.titles[session] = title
        return title


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
        try:
            # Optional: only some trackers ask how the process ends.
            if hasattr(one.sink, "close_at_exit"):
                one.sink.close_at_exit(uncaught)
            else:
                one.sink.close()
        except Exception as error:  # noqa: BLE001 # whatever a client raises
            text = "the sink %s could not be closed: %s"
            # An event may have reported it.
            level = logging.INFO if one.failed else logging.ERROR
            _LOGGER.log(level, text, type(one.sink).__name__, error)
