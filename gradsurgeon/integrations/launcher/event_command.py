"""`--on-event COMMAND`: a command of the user's shell gets each trap, spike and finding, and the end, as JSON."""

import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

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


def document(event: Event, **more: object) -> bytes:
    """Return an event as one line of JSON."""
    values = {**asdict(event), **more}
    return f"{json_text(values)}\n".encode()


class EventCommand:
    """Starts the command for one event after the other, on a thread of its own. The training only queues them."""

    def __init__(self, settings: Settings, report: Callable[[str], None]) -> None:
        self._command = settings.on_event
        self._folder = settings.folder
        self._report = report
        self._waiting: queue.Queue[bytes | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        # When the commands of events that still wait at the end must be over, by the monotonic clock.
        self._deadline: float | None = None
        self._left_out = 0
        # The problems of the command, each once.
        self.failures: list[str] = []

    def event(self, event: Event) -> None:
        if not self._command or event.kind not in TRIPS:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self._left_out += 1
            return
        self._waiting.put(document(event))
        # A forked child has no thread. At the end of Python none can be started any more.
        is_working = self._thread is not None and self._thread.is_alive()
        if not is_working and self._deadline is None:
            self._thread = threading.Thread(
                target=self._work, name="gradsurgeon events", daemon=True
            )
            self._thread.start()

    def finish(self) -> None:
        """Wait until the command has been started for all events so far, within the limit."""
        if not self._command:
            return
        if self._deadline is None:
            self._deadline = time.monotonic() + LIMIT
        self._waiting.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        else:
            self._work()
        if self._left_out:
            self._fail(f"it was not started for {self._left_out:,} events, which came too fast")
            self._left_out = 0

    def end(self, step: int, rank: int, error: BaseException | None) -> None:
        """Start the command for the end of this process. Rank 0 tells a clean end, each rank its own error."""
        cause = cause_of_end(error)
        if not self._command or (rank and not cause):
            return
        self.finish()
        state, words = end_of_rank(RankEnd("finished", cause, None))
        end = Event("notice", str(cause.get("rule", "")), step, rank, "", words)
        ended = {"state": state, "words": words, **cause}
        self._run(document(end, kind="end", ended=ended), LIMIT)

    def _work(self) -> None:
        while True:
            event = self._waiting.get()
            if event is None:
                return
            limit = LIMIT
            if self._deadline is not None:
                limit = min(LIMIT, self._deadline - time.monotonic())
            if limit > 0:
                self._run(event, limit)
            else:
                self._left_out += 1

    def _run(self, event: bytes, limit: float) -> None:
        environment = without_rules(os.environ)
        environment.pop(STATUS_FILE, None)
        try:
            # Not a pipe: a worker that the script forks meanwhile would keep it open, and the command would wait for its end.
            with tempfile.TemporaryFile() as file:
                file.write(event)
                file.seek(0)
                # Its output must not get into what the script prints. Ctrl-C is for the script.
                process = subprocess.Popen(  # noqa: S602 # the user asked for this command
                    self._command,
                    shell=True,
                    cwd=self._folder,
                    env=environment,
                    stdin=file,
                    stdout=2,
                    start_new_session=True,
                )
        except OSError as error:
            self._fail(f"it cannot be started: {error.strerror}")
            return
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._fail(f"it took more than {limit:.0f} seconds and was ended")
            return
        if process.returncode:
            self._fail(f"it ended with status {process.returncode}")

    def _fail(self, problem: str) -> None:
        text = f"the command of --on-event: {problem}; training does not depend on it"
        if text not in self.failures:
            self.failures.append(text)
            self._report(text)
