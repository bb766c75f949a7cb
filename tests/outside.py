"""A script that nobody edits, in a folder of its own, under `gradsurgeon run`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import forks
from bounds import TIMEOUT
from commands import environment

import gradsurgeon

TRAIN = """
import os, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("trained")
"""
NORMS = "  - {id: norms, action: norm-log, params: '*'}\n"


@dataclass
class Launched:
    """How it ended, and what it said."""

    code: int
    out: str
    lines: list[str]

    def headers(self) -> list[str]:
        """Return the first line of each header."""
        return [line for line in self.lines if " parameters, " in line]


@dataclass
class Folder:
    """A folder with a script and rules; records go to `run`."""

    path: Path

    def run(
        self,
        script: str,
        *options: str,
        rules: str = NORMS,
        record: bool = True,
        start: tuple[str, ...] = (),
        launch: tuple[str, ...] = ("train.py",),
        env: Mapping[str, str] | None = None,
    ) -> Launched:
        """Run a script under rules, in a fork of a Python that has imported torch.

        Args:
            script: its text.
            options: of the launcher.
            rules: the rules of a rule file.
            record: whether to write records.
            start: what starts the launcher, after `python`, in a process of its own.
            launch: what the launcher starts.
            env: further variables.
        """
        (self.path / "train.py").write_text(script, encoding="utf-8")
        (self.path / "rules.yaml").write_text(f"version: 1\nrules:\n{rules}", encoding="utf-8")
        own = ["--rules", "rules.yaml", *(("--record", "run") if record else ()), *options]
        words = (*start, "-m", "gradsurgeon", "run", *own, *launch)
        variables = {**environment(), "OMP_NUM_THREADS": "1", **(env or {})}
        done = _run(words, self.path, variables, forked=not start)
        return Launched(done.returncode, done.stdout.decode(), done.stderr.decode().splitlines())

    def steps(self, name: str, folder: str = "run") -> list[int]:
        """Return the steps at which a parameter has records."""
        with gradsurgeon.open_run(self.path / folder) as run:
            return [step for step, _ in run.history(name)]

    def databases(self) -> list[str]:
        """Return what records there are."""
        return sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*.db"))


def _run(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], *, forked: bool
) -> subprocess.CompletedProcess[bytes]:
    if forked:
        return forks.start(words, cwd=cwd, env=env).wait(TIMEOUT)
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        check=False,
        timeout=TIMEOUT,
    )
