"""What a run directory and a sink have in common: when they are due, and how they report problems."""

import os
import time


class Outlet:
    """Where records go besides memory. It is due every so many seconds, and reports each problem once.

    Attributes:
        failed: why nothing is written any more, empty if that is not so.
    """

    def __init__(self, seconds: float) -> None:
        self.failed = ""
        self._ended = False
        # The problems so far, each with whether `news` has returned it.
        self._problems: dict[str, bool] = {}
        self._pid = os.getpid()
        self._seconds = seconds
        self._committed = self._step = time.monotonic()

    @property
    def _inherited(self) -> bool:
        # A forked data loader inherits an outlet. Its file and its thread belong to the parent.
        return os.getpid() != self._pid

    @property
    def closed(self) -> bool:
        """Whether nothing is written any more: ended, failed, or in a child process."""
        return self._ended or bool(self.failed) or self._inherited

    def due(self, ahead: float = 0.0) -> bool:
        """Return whether it is time for a commit, or for `news`, some seconds from now."""
        is_time = time.monotonic() + ahead - self._committed >= self._seconds
        return is_time and (not self.closed or not all(self._problems.values()))

    def ends_step(self) -> bool:
        """Mark the end of a step. Return whether its rows would be too old at the end of the next step."""
        now = time.monotonic()
        step, self._step = now - self._step, now
        return self.due(step)  # the next step is assumed to take as long

    def news(self) -> list[str]:
        """Return the problems since the last call."""
        news = [text for text, told in self._problems.items() if not told]
        self._problems |= dict.fromkeys(news, True)
        return [] if self._inherited else news

    def _note(self, problem: str) -> None:
        self._problems.setdefault(problem, False)
