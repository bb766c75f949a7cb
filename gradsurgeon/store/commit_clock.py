"""When what waits is to be written, or sent."""

import time


class CommitClock:
    """Tells whether so many seconds have passed since it was started, or will have by the end of the next step."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._commit = self._step = time.monotonic()

    def restart(self) -> None:
        self._commit = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._commit >= self._seconds

    def ends_step(self) -> bool:
        """Mark the end of a step; the next one is taken to last as long as this one did."""
        now = time.monotonic()
        step, self._step = now - self._step, now
        return now + step - self._commit >= self._seconds
