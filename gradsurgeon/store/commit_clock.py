"""The time at which waiting rows are written, or sent."""

import time


class CommitClock:
    """Tells whether so many seconds have passed since the last start, or will have at the end of the next step."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._commit = self._step = time.monotonic()

    def restart(self) -> None:
        self._commit = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._commit >= self._seconds

    def ends_step(self) -> bool:
        """Mark the end of a step. The next step is assumed to take as long."""
        now = time.monotonic()
        step, self._step = now - self._step, now
        return now + step - self._commit >= self._seconds
