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
from ranks import Job

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
    err: str

    @property
    def lines(self) -> list[str]:
        """Return the lines of stderr."""
        return self.err.splitlines()

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
        ranks: int = 0,
        launch: Sequence[str] = ("train.py",),
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Launched:
        """Run a script under rules, in forks of a Python that has imported torch.

        Args:
            script: its text.
            options: of the launcher.
            rules: the rules of a rule file.
            record: whether to write records.
            ranks: on how many ranks, with what torchrun does for them; 0 is a process without ranks.
            launch: what the launcher starts.
            env: further variables.
            stdin: what the script reads, if it has no ranks.
        """
        self.write(script, rules)
        own = ["--rules", "rules.yaml", *(("--record", "run") if record else ()), *options]
        words = ("-m", "gradsurgeon", "run", *own, *launch)
        return self.fork(*words, ranks=ranks, env=env, stdin=stdin)

    def write(self, script: str, rules: str = NORMS) -> None:
        """Write the script and the rules."""
        (self.path / "train.py").write_text(script, encoding="utf-8")
        (self.path / "rules.yaml").write_text(f"version: 1\nrules:\n{rules}", encoding="utf-8")

    def fork(
        self, *words: str, ranks: int = 0, env: Mapping[str, str] | None = None, stdin: str = ""
    ) -> Launched:
        """Do what `python` does with these words, on one rank after the other in what is returned."""
        variables = {**environment(), "OMP_NUM_THREADS": "1", **(env or {})}
        if ranks:
            done = Job([words] * ranks, cwd=self.path, env=variables).wait()
        else:
            fork = forks.start(words, cwd=self.path, env=variables, stdin=stdin.encode())
            done = [fork.wait(TIMEOUT)]
        return Launched(
            max((one.returncode for one in done), key=abs),
            "".join(one.stdout.decode() for one in done),
            "".join(one.stderr.decode() for one in done),
        )

    def start(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Start Python with these words, in a process of its own."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.path,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )

    def steps(self, name: str, folder: str = "run") -> list[int]:
        """Return the steps at which a parameter has records."""
        with gradsurgeon.open_run(self.path / folder) as run:
            return [step for step, _ in run.history(name)]

    def databases(self) -> list[str]:
        """Return what records there are."""
        return sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*.db"))
