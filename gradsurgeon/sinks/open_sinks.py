"""Sinks that are open, and stay so from session to session until the process ends."""

from __future__ import annotations

import atexit
import logging
import os
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


@atexit.register
def close_all() -> None:
    """Close the sinks that this process has used, at its end: until then another session may begin."""
    with _changing:
        ended = [one for one in _open.values() if one.pid == os.getpid() and not one.users]
        for one in ended:
            del _open[id(one.sink)]
    for one in ended:
        try:
            one.sink.close()
        except Exception as error:
            if not one.failed:
                _LOGGER.exception("the sink %s could not be closed", type(one.sink).__name__)
            else:  # which has been told
                _LOGGER.info("the sink %s could not be closed: %s", type(one.sink).__name__, error)
