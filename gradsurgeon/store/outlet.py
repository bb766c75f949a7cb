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
        self._problems: list[str] = []
        self._told = 0
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

    def due(self) -> bool:
        """Return whether it is time for a commit, or for `news`."""
        return self._is_due(time.monotonic())

    def ends_step(self) -> bool:
        """Mark the end of a step. Return whether its rows would be too old at the end of the next step."""
        now = time.monotonic()
        step, self._step = now - self._step, now
        return self._is_due(now + step)  # the next step is assumed to take as long

    def _is_due(self, now: float) -> bool:
        return now - self._committed >= self._seconds and (not self.closed or self._has_news)

    @property
    def _has_news(self) -> bool:
        return self._told < len(self._problems) and not self._inherited

    def news(self) -> list[str]:
        """Return the problems since the last call."""
        if not self._has_news:
            return []
        told, self._told = self._told, len(self._problems)
        return self._problems[told:]

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)
