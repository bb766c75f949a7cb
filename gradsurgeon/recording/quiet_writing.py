"""A thread that writes the last rows of a script that hangs."""

import threading
import weakref
from collections.abc import Callable

_SECONDS = 0.5


class QuietWriting:
    """Calls a method every half second until `stop`, or until its object is gone.

    Args:
        write: a bound method, which is referenced weakly.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_work,
            args=(weakref.WeakMethod(write), self._stopped),
            name="gradsurgeon records",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, unless it is writing right now: then it ends afterwards."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_SECONDS)


def _work(write: weakref.WeakMethod[Callable[[], None]], stopped: threading.Event) -> None:
    while not stopped.wait(_SECONDS):
        method = write()
        if method is None:
            return
        try:
            method()
        except Exception:  # noqa: BLE001 # the rows wait for the next step then, as they would without this thread
            return
        # A reference here would keep the object alive while the thread sleeps.
        del method
