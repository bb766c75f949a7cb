"""A run as it is right now, read again and again while it is being written. No torch.

Each reading opens the files anew and lets go of them, so that ranks may join, and so that the writer
finds nobody there when it ends the run. It reads the newest rows, whatever the length of the run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from gradsurgeon.report.report import Report
from gradsurgeon.report.sources import from_run
from gradsurgeon.store.run import Run, closed_at, of_lowest_ranks, open_run

# So many rows of each series are in view; fewer of a very large model, down to what tells a spike.
_ROWS_MOST, _ROWS_LEAST = 256, 32
_VALUES = 2**18
# A run is written once in a second: between two readings in less, no step may have arrived, or many.
_PACE_SECONDS = 10.0


class Snapshot(NamedTuple):
    """A run at one moment.

    Attributes:
        report: of the newest rows.
        pace: steps per second in the last seconds of watching, `None` where it is not known.
        elapsed: seconds since the run began, until its end if that is known.
    """

    report: Report
    pace: float | None
    elapsed: float | None

    @property
    def is_running(self) -> bool:
        return self.report.ended is not None and self.report.ended.state == "running"


class LiveRun:
    """A run directory to be read again and again.

    Args:
        path: the directory.
        clock: returns seconds that never run backwards, to measure the pace by.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque()
        self._elapsed: float | None = None

    def read(self) -> Snapshot:
        """Return the run as it is now.

        Raises:
            RecordError: it is not there, is damaged, or its files are just being made.
            GradSurgeonError: numpy is missing.
        """
        with open_run(self._path, partly=True) as run:
            width = sum(len(one.key.names) for one, _ in of_lowest_ranks(run))
            rows = max(_ROWS_LEAST, min(_ROWS_MOST, _VALUES // max(1, width)))
            report = from_run(run, newest=rows)
            is_running = report.ended is not None and report.ended.state == "running"
            pace = self._pace(report.steps[1]) if is_running and report.steps else None
            return Snapshot(report, pace, self._since_begin(run, is_running=is_running))

    def _pace(self, step: int) -> float | None:
        now = self._clock()
        self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[1][0] >= _PACE_SECONDS:  # noqa: PLR2004 # two
            self._steps.popleft()
        begin, first = self._steps[0]
        return (step - first) / (now - begin) if now > begin else None

    def _since_begin(self, run: Run, *, is_running: bool) -> float | None:
        ended = closed_at(run)
        if ended is not None or is_running:
            created = run.meta.get("created")
            try:
                begin = datetime.fromisoformat(str(created)).timestamp()
            except (ValueError, OverflowError, OSError):
                return None
            self._elapsed = (time.time() if ended is None else ended) - begin
        # When a run stopped that was not closed is only known to who has seen it running.
        return self._elapsed
