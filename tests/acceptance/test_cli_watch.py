"""`gradsurgeon watch`: in a real pseudo-terminal, and where there is none."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import WITHOUT_TORCH, call, environment, quiet, refused
from runs import add, another_process, values, write

from gradsurgeon import Event
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

LIMIT = TIMEOUT / 10
KEY = Key("norms", "l2", "accumulated", ("w",))

# Only what is in the session of a terminal gets its signals. A shell that starts the tests in the background has them
# ignore Ctrl-C, and with them all that they start.
IN_A_TERMINAL = f"""
import fcntl, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
{WITHOUT_TORCH}"""

WRITES_FOR_EVER = """
import sys, time
from runs import add, KEY, meta, values
from gradsurgeon.records.store.writer import RunWriter
writer = RunWriter(sys.argv[1], meta=meta())
print("ready", flush=True)
for step in range(10**9):
    add(writer, KEY, step, values(1.0, 2.0))
    writer.commit()
    time.sleep(0.01)
"""


class Watching:
    """The command in a pseudo-terminal: what it writes there, and what is typed."""

    def __init__(self, *arguments: str, cwd: Path, before: str = "", **env: str) -> None:
        self.master, self.slave = os.openpty()
        self.resize(30, 90)
        self.text = ""
        unset = {"COLUMNS", "LINES", "NO_COLOR"}
        kept = {name: value for name, value in environment().items() if name not in unset}
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + IN_A_TERMINAL, "watch", *arguments],
            cwd=cwd,
            env={**kept, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **env},
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def resize(self, rows: int, columns: int) -> None:
        termios.tcsetwinsize(self.slave, (rows, columns))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def until(self, found: Callable[[str], object]) -> None:
        """Read on until something is on the screen."""
        end = time.monotonic() + LIMIT
        while not found(self.text):
            ready = select.select([self.master], [], [], end - time.monotonic())[0]
            assert ready, self.text
            self.text += os.read(self.master, 2**16).decode()

    def ended(self) -> tuple[int, str]:
        """Return exit code and standard error, once all that was written is read."""
        end = time.monotonic() + LIMIT
        while (running := self.process.poll() is None) or self._is_more():
            assert time.monotonic() < end, self.text
            if not running or self._is_more():
                self.text += os.read(self.master, 2**16).decode()
        assert self.process.stderr is not None
        return self.process.wait(), self.process.stderr.read().decode()

    def _is_more(self) -> bool:
        return bool(select.select([self.master], [], [], 0.05)[0])

    def frames(self) -> list[list[str]]:
        """Return what each drawing has put on the screen, line by line."""
        drawn = self.text.split("\x1b[H")[1:]
        texts = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", one).rstrip() for one in drawn]
        # The terminal itself puts one more carriage return before each line feed.
        return [re.split("\r+\n", text) for text in texts]


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, before: str = "", **env: str) -> Watching:
            one = Watching(*arguments, cwd=tmp_path, before=before, **env)
            stack.callback(one.process.communicate)
            stack.callback(one.process.kill)
            stack.callback(os.close, one.master)
            stack.callback(os.close, one.slave)
            return one

        yield start


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    writer = write(tmp_path / "run", {"w": [1.0, 2.0, 3.0]})
    writer.commit()
    yield writer
    writer.close()


class TestInATerminal:
    def test_it_draws_follows_the_run_and_ends_with_it(
        self, writer: RunWriter, watching: Callable[..., Watching]
    ) -> None:
        watched = watching("run", "--every", "0.2")
        watched.until(lambda text: "step 2" in text)
        for step in range(3, 6):
            add(writer, KEY, step, values(100.0 * step))
            writer.event(Event("trap", "norms", step, 0, "w\x1b[2J", "bad\nvery"))
            watched.until(lambda text, step=step: f"step {step} of rules.yaml on Net" in text)  # type: ignore[misc]
        writer.close()
        code, errors = watched.ended()
        assert (code, errors) == (0, "")
        frames = watched.frames()
        first, last = frames[0], frames[-1]
        assert first[:4] == ["step 2 of rules.yaml on Net", "fine: running", "", "events (0)"]
        assert first[-1] == "Ctrl-C quits; every 0.2 s"
        assert last[:3] == [
            "step 5 of rules.yaml on Net",
            "look: bad",
            "ended, traps tripped in 3 steps",
        ]
        assert last[4:6] == [
            "events (3): trap 3",
            "  step 3  trap  norms  w\\x1b[2J  x3, steps 3..5  bad",
        ]
        assert "norm of w: 500 at step 5" in "\n".join(last)

    def test_ctrl_c_ends_it(self, writer: RunWriter, watching: Callable[..., Watching]) -> None:
        watched = watching("run", "--every", "600")
        watched.until(lambda text: "Ctrl-C quits" in text)
        watched.type(b"\x03")
        assert watched.ended() == (130, "")

    def test_a_file_that_is_damaged_meanwhile(
        self, writer: RunWriter, watching: Callable[..., Watching], tmp_path: Path
    ) -> None:
        watched = watching("run", "--every", "0.2")
        watched.until(lambda text: "Ctrl-C quits" in text)
        (tmp_path / "run" / "run.json").write_text("{")
        code, errors = watched.ended()
        assert code == 2
        assert errors.startswith("gradsurgeon: run/run.json: is damaged")
        assert len(errors.splitlines()) == 1

    def test_it_fits_whatever_the_size(
        self, tmp_path: Path, watching: Callable[..., Watching]
    ) -> None:
        names = [f"model.layers.{number}.attention.query.weight" for number in range(40)]
        writer = write(tmp_path / "run", {name: [1.0, 2.0] for name in names})
        for step in range(20):
            writer.event(Event("trap", "norms", step, 0, "w", "m" * 200))
        watched = watching("run", "--every", "0.2")
        for rows, columns in ((24, 80), (50, 120), (10, 40), (3, 10)):
            watched.until(lambda text: "events" in text)
            watched.resize(rows, columns)
            # One more drawing may have begun before.
            before = len(watched.frames())
            watched.until(lambda _: len(watched.frames()) > before + 2)  # noqa: B023 # called at once
            frame = watched.frames()[-2]
            # The last row is empty: a line feed in it would move all the others.
            assert len(frame) == {50: 22, 24: 22}.get(rows, rows - 1)
            assert frame[-1] == "Ctrl-C quits; every 0.2 s"[:columns]
            assert max(map(len, frame)) <= columns
        writer.close()
        watched.ended()

    def test_a_dumb_terminal_gets_lines(
        self, writer: RunWriter, watching: Callable[..., Watching]
    ) -> None:
        watched = watching("run", "--every", "0.2", TERM="dumb")
        watched.until(lambda text: text.count("\n") >= 2)
        writer.close()
        assert watched.ended() == (0, "")
        assert "\x1b" not in watched.text
        assert "\r\nfine: ended, clean\r\nsummary: rules.yaml on Net: steps 0..2" in watched.text


class TestElsewhere:
    def test_a_line_each_time_until_the_run_is_killed(self, tmp_path: Path) -> None:
        with another_process(WRITES_FOR_EVER, str(tmp_path / "run")) as process:
            threading.Timer(8.0, process.kill).start()
            done = call("watch", "run", "--every", "0.3", cwd=tmp_path, code=WITHOUT_TORCH)
        quiet(done)
        *lines, last, _summary = done.stdout.splitlines()
        assert re.fullmatch(
            r"broken: no end was written, last record at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: what came after it is missing",
            last,
        )
        assert len(lines) >= 2
        one = (
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
            r"summary: rules.yaml on Net: steps 0..(\d+), 0 events.*"
        )
        found = [re.fullmatch(one, line) for line in lines]
        steps = [int(match[1]) for match in found if match]
        assert len(steps) == len(lines)
        assert steps == sorted(steps)
        assert steps[-1] > steps[0]

    def test_a_run_that_is_not_there_yet(
        self, tmp_path: Path, watching: Callable[..., Watching]
    ) -> None:
        watched = watching("run", "--every", "0.2", TERM="dumb")
        watched.until(lambda text: "waiting for the run run to begin; Ctrl-C quits" in text)
        write(tmp_path / "run", {"w": [1.0]}).close()
        assert watched.ended() == (0, "")
        assert watched.text.count("waiting") == 1
        assert "ended, clean" in watched.text

    def test_a_file_is_no_run_to_wait_for(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").touch()
        done = call("watch", "train.py", cwd=tmp_path)
        refused(done)
        assert done.stderr.startswith("gradsurgeon: train.py: cannot be opened as a run")

    @pytest.mark.parametrize("every", ["0.1", "-1", "nan", "inf", "often"])
    def test_odd_numbers_of_seconds(self, tmp_path: Path, every: str) -> None:
        done = call("watch", "run", f"--every={every}", cwd=tmp_path)
        refused(done)
        assert f"argument --every: {every!r} is no number of at least 0.2" in done.stderr
