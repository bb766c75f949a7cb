"""SIGTERM ends a launched script as it ends any script, after the summary and the last records.

Python runs signal handlers in the main thread, between two instructions. A rank that waits in C for a
collective would therefore never run the handler, and ignore the signal. So a second thread, which the
signal itself wakes, finishes if the main thread does not. Either way the process ends within seconds.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradsurgeon.launcher.messages import say

_TURN_SECONDS = 1.0  # within which the main thread must begin
_LIMIT_SECONDS = 2.0  # within which the summary must be complete


class SigtermHandler:
    """Finishes at SIGTERM, unless the script handles the signal."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._turn = threading.Lock()
        self._begun, self._over = threading.Event(), threading.Event()
        self._read = self._write = -1
        self._forking = threading.local()

    def install(self) -> None:
        """Handle the signal unless the script does; a handler that the script sets later replaces this one."""
        free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not free or threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, self._handle)
        if os.name != "nt":  # On Windows no signal comes from outside.
            self._start_thread()

    def _start_thread(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:
            # The script, such as its event loop, already uses the descriptor: the main thread must do.
            signal.set_wakeup_fd(before)
            return
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._in_parent, after_in_child=self._in_child
        )
        threading.Thread(target=self._wait, name="gradsurgeon", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Finish, and then die of the signal as if there were no handler."""
        del frame
        if signal.getsignal(number) != self._handle:
            return  # A handler of the script called the handler before it, which was the default.
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        self._finish_once()
        os.kill(os.getpid(), number)

    def _finish_once(self) -> None:
        if self._turn.acquire(blocking=False):
            self._begun.set()
            try:
                self._finish()
            finally:
                self._over.set()
        else:
            self._over.wait(_LIMIT_SECONDS)

    def _wait(self) -> None:
        while number := os.read(self._read, 1):
            # Each signal arrives as its number. Signals that the script handles are left to the script.
            ours = self._begun.is_set() or signal.getsignal(signal.SIGTERM) == self._handle
            if number[0] == signal.SIGTERM and ours:
                break
        if not self._begun.wait(_TURN_SECONDS):
            # In a third thread, because the summary may wait for something that never comes.
            threading.Thread(target=self._finish_once, daemon=True).start()
        if not self._over.wait(_LIMIT_SECONDS):
            say("terminated before the summary was complete")
        # `signal.signal` works in the main thread only.
        ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)

    def _before_fork(self) -> None:
        # Before the child has its own handlers, a signal to the child would wake the thread of the parent.
        mask: Any = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self._forking.mask = mask

    def _in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _in_child(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        other = signal.set_wakeup_fd(-1)
        if other not in (-1, self._write):
            signal.set_wakeup_fd(other)
        os.close(self._read)
        os.close(self._write)
        self._in_parent()
