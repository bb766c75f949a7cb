"""`--on-event COMMAND`: a command of the user's shell gets each trap, spike and finding, and the end, as JSON."""

import math
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from gradsurgeon.common.events import TRIPS, Event
from gradsurgeon.integrations.launcher.messages import STATUS_FILE
from gradsurgeon.integrations.launcher.settings import Settings, without_rules
from gradsurgeon.records.recorder import cause_of_end
from gradsurgeon.records.store.layout import json_text
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.ending import end_of_rank

# One command runs at a time, for at most so many seconds. At the end, all events that still wait get as many together.
LIMIT = 60.0
# So many events wait. A training with more events at once leaves the rest out.
MOST_WAITING = 100


class EventCommand:
    """Starts the command for one event after the other, on a thread of its own. The training only queues them."""

    def __init__(self, settings: Settings, report: Callable[[str], None]) -> None:
        self._settings = settings
        # The script has not begun, and may change the directory.
        self._folder = Path.cwd()
        self._report = report
        # `None` ends the thread.
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread()
        # When the last command must be over, by the monotonic clock.
        self._deadline = math.inf
        # The problems of the command, each once.
        self.failures: list[str] = []

    def event(self, event: Event) -> None:
        if not self._settings.on_event or event.kind not in TRIPS:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self._fail(
                f"{MOST_WAITING} events wait for it already, and later events do not start it"
            )
            return
        self._waiting.put(event)
        # A forked child has no thread. At the end of Python none can be started any more.
        if not self._thread.is_alive() and self._deadline == math.inf:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until the command was started for all events so far, within the limit."""
        self._deadline = min(self._deadline, time.monotonic() + LIMIT)
        self._waiting.put(None)
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._work()

    def end(self, step: int, rank: int, error: BaseException | None) -> None:
        """Start the command for the end of this process. Rank 0 reports a clean end, each rank its own error."""
        cause = cause_of_end(error)
        if not self._settings.on_event or (rank and not cause):
            return
        self.finish()
        self._deadline = math.inf
        state, words = end_of_rank(RankEnd("finished", cause, None))
        end = Event("notice", str(cause.get("rule", "")), step, rank, "", words)
        self._run(
            {**asdict(end), "kind": "end", "ended": {"state": state, "words": words, **cause}}
        )

    def _work(self) -> None:
        for event in iter(self._waiting.get, None):
            self._run(asdict(event))

    def _run(self, document: dict[str, object]) -> None:
        limit = min(LIMIT, self._deadline - time.monotonic())
        if limit <= 0:
            self._fail(f"some events did not start it in the last {LIMIT:.2g} seconds")
            return
        environment = without_rules(os.environ)
        environment.pop(STATUS_FILE, None)
        try:
            # Not a pipe: a worker that the script forks meanwhile would keep it open, and the command would wait for its end.
            with tempfile.TemporaryFile() as file:
                file.write(f"{json_text(document)}\n".encode())
                file.seek(0)
                # Its output must not get into what the script prints. Ctrl-C is for the script.
                process = subprocess.Popen(  # noqa: S602 # the user asked for this command
                    self._settings.on_event,
                    shell=True,
                    cwd=self._folder,
                    env=environment,
                    stdin=file,
                    stdout=2,
                    start_new_session=True,
                )
            status = process.wait(limit)
        except OSError as error:
            self._fail(f"it cannot be started: {error.strerror}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._fail(f"it was ended after {limit:.2g} seconds; the next event starts it again")
        else:
            if status:
                self._fail(f"it ended with status {status}")

    def _fail(self, problem: str) -> None:
        text = f"the command of --on-event: {problem}; training does not depend on it"
        if text not in self.failures:
            self.failures.append(text)
            self._report(text)
