"""Runs the scripts of `tests/scripts` as their authors would, and under `gradsurgeon run`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import forks
from bounds import TIMEOUT
from commands import environment
from ranks import Job

import gradsurgeon

SCRIPTS = Path(__file__).with_name("scripts")
OBSERVE = """\
version: 1
rules:
  - {id: norms, action: norm-log, params: "*"}
  - {id: trap, action: nan-trap, params: "*"}
"""


@dataclass(frozen=True, order=True, slots=True)
class Trained:
    """A model that a script trains, as its records tell.

    Attributes:
        origin: class name of the root.
        first: canonical name of its first parameter: another root would have another prefix.
        steps: how many steps have records.
        ranks: how many ranks wrote them.
        start: the first of these steps.
    """

    origin: str
    first: str
    steps: int
    ranks: int = 1
    start: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A script as it is called, and what training it does.

    Attributes:
        words: what comes after `python`, or after the options of a launcher.
        models: what it trains.
        code: the exit code.
        stdin: what it reads.
        distributed: it runs on two ranks, in forks that have what torchrun gives to its ranks.
        noisy: what it prints to stderr differs from run to run, or a progress bar is redrawn there.
        killed: it ends without a chance to close the records.
        forked: without rules it does the same in a fork of a Python that has imported torch.
        process: under rules it runs in a process of its own: what it shows is in how Python starts or ends.
    """

    words: tuple[str, ...]
    models: tuple[Trained, ...] = ()
    code: int = 0
    stdin: str = ""
    distributed: bool = False
    noisy: bool = False
    killed: bool = False
    forked: bool = True
    process: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended, and the run directory that it wrote to."""

    code: int
    stdout: bytes
    stderr: str
    record: Path


@dataclass(slots=True)
class Runs:
    """Processes under way, as many as there are cores; each kind is run once."""

    folder: Path
    pool: ThreadPoolExecutor
    _known: dict[Hashable, Future[Outcome]] = field(default_factory=dict)

    def start(self, key: Hashable, run: Callable[[Path], Outcome]) -> Future[Outcome]:
        """Start what is not known yet, in a folder of its own."""
        if key not in self._known:
            place = self.folder / str(len(self._known))
            place.mkdir()
            self._known[key] = self.pool.submit(run, place)
        return self._known[key]

    def plain(self, case: Case) -> Future[Outcome]:
        """Run a script as its author does."""
        return self.start(("plain", case), lambda place: call(case, place))

    def launched(
        self, case: Case, rules: str = OBSERVE, *options: str, env: tuple[tuple[str, str], ...] = ()
    ) -> Future[Outcome]:
        """Run a script under rules."""
        return self.start(
            (case, rules, options, env),
            lambda place: call(case, place, rules=rules, options=options, env=dict(env)),
        )

    def written(self, case: Case, anchor: str, code: str) -> Future[Outcome]:
        """Run a script with some lines written into it, after those that end with the anchor."""
        return self.start(
            ("written", case, anchor, code),
            lambda place: call(case, place, edit=lambda text: _insert(text, anchor, code)),
        )


def call(
    case: Case,
    place: Path,
    *,
    rules: str | None = None,
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    edit: Callable[[str], str] | None = None,
) -> Outcome:
    """Run a script and wait for it.

    Args:
        case: the script.
        place: an empty folder.
        rules: text of a rule file, for `gradsurgeon run`.
        options: further ones for that.
        env: further variables.
        edit: changes the text of the script.
    """
    words = list(case.words)
    variables = {**environment(), "OMP_NUM_THREADS": "1"}
    if edit is not None:
        script = place / words[0]
        script.write_text(edit((SCRIPTS / words[0]).read_text(encoding="utf-8")), encoding="utf-8")
        words[0] = str(script)
        # The neighbours that it imports.
        variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(SCRIPTS)])
    record = place / "record"
    if rules is not None:
        file = place / "rules.yaml"
        file.write_text(rules, encoding="utf-8")
        # Relative, since scripts change directory.
        own = [
            "--rules",
            os.path.relpath(file, SCRIPTS),
            "--record",
            os.path.relpath(record, SCRIPTS),
        ]
        words = ["-m", "gradsurgeon", "run", *own, *options, *words]
    variables |= env or {}
    forked = case.forked if rules is None else not case.process
    if case.distributed:
        ended = Job([words] * 2, cwd=SCRIPTS, env=variables).wait()
    elif forked:
        fork = forks.start(words, cwd=SCRIPTS, env=variables, stdin=case.stdin.encode())
        ended = [fork.wait(TIMEOUT)]
    else:
        ended = [_processed([sys.executable, *words], variables)]
    code = max((one.returncode for one in ended), key=abs)
    stdout = b"".join(one.stdout for one in ended)
    stderr = b"".join(one.stderr for one in ended)
    return Outcome(code, stdout, stderr.decode(), record)


def _processed(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command,
        cwd=SCRIPTS,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )


def _insert(text: str, anchor: str, code: str) -> str:
    assert text.count(f"{anchor}\n") == 1, anchor
    return text.replace(f"{anchor}\n", f"{anchor}\n{code}\n")


def trained(record: Path, *, merged: bool = False) -> list[Trained]:
    """Return the models that have records, whichever directory they are in; steps without gaps.

    Args:
        record: the directory.
        merged: whether rank 0 alone has norms, because it merges the parts of all ranks; each rank has its own loss.
    """
    found = []
    for file in sorted(record.rglob("run.json")):
        with gradsurgeon.open_run(file.parent) as run:
            ranks = [_steps(run, rank) for rank in run.ranks]
            others = [] if merged else ranks[0]
            assert all(own == others for own in ranks[1:]), (file, ranks)
            start, count = min(ranks[0], default=0), len(ranks[0])
            assert ranks[0] == list(range(start, start + count)), (file, ranks[0])
            origin = run.meta["model"]["origin"]
            found.append(Trained(origin, run.params[0], count, len(ranks), start))
    return sorted(found)


def _steps(run: Any, rank: int) -> list[int]:
    steps: set[int] = set()
    for series in run:
        if series.rank == rank and series.key.stat not in ("loss", "lr"):
            steps.update(step for step, *_ in series.stored())
    return sorted(steps)


def states(record: Path) -> set[Literal["running", "finished", "stopped"]]:
    """Return how the runs of a script were left."""
    found: set[Any] = set()
    for file in record.rglob("run.json"):
        with gradsurgeon.open_run(file.parent) as run:
            found |= set(run.states.values())
    return found


def events_of(record: Path) -> list[str]:
    """Return the messages of all events, notices included."""
    found = []
    for file in sorted(record.rglob("run.json")):
        with gradsurgeon.open_run(file.parent) as run:
            found += [f"{event.kind}: {event.message}" for event in run.events]
    return found
