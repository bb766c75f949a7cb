"""A script that nobody edits, in a folder of its own, under `gradsurgeon run`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
        """Run a script under rules.

        Args:
            script: its text.
            options: of the launcher.
            rules: the rules of a rule file.
            record: whether to write records.
            start: what starts the launcher, after `python`.
            launch: what the launcher starts.
            env: further variables.
        """
        (self.path / "train.py").write_text(script, encoding="utf-8")
        (self.path / "rules.yaml").write_text(f"version: 1\nrules:\n{rules}", encoding="utf-8")
        own = ["--rules", "rules.yaml", *(("--record", "run") if record else ()), *options]
        done = subprocess.run(
            [sys.executable, *start, "-m", "gradsurgeon", "run", *own, *launch],
            cwd=self.path,
            env={**environment(), "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
        return Launched(done.returncode, done.stdout, done.stderr.splitlines())

    def steps(self, name: str, folder: str = "run") -> list[int]:
        """Return the steps at which a parameter has records."""
        with gradsurgeon.open_run(self.path / folder) as run:
            return [step for step, _ in run.history(name)]

    def databases(self) -> list[str]:
        """Return what records there are."""
        return sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*.db"))
