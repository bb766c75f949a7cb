"""`--record DIR` where there is a run already: refused before training, in the same way on all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from outside import TRAIN, Folder
from ranks import torchrun
from runs import JOB

from gradsurgeon.integrations.launcher.settings import Settings
from gradsurgeon.records.store import layout

pytestmark = pytest.mark.slow


TAKEN = "run holds a run already: name another directory, or remove it"


def test_ranks_of_another_start_refuse_it_together_or_go_to_one_of_their_own(
    folder: Folder,
) -> None:
    folder.write(TRAIN)
    settings = Settings(rules=str(folder.path / "rules.yaml"), record=str(folder.path / "run"))
    variables = settings.environment(environment())
    # Ranks in forks all have the same parent: the other start is one of torchrun.
    command = [sys.executable, *torchrun(1), "train.py"]
    subprocess.run(command, cwd=folder.path, env=variables, capture_output=True, check=True)
    assert folder.databases() == ["run/rank-0.db"]
    for ranks in (1, 2):
        done = folder.run(TRAIN, ranks=ranks)
        assert (done.code, done.out) == (2, "")
        assert done.lines == [f"gradsurgeon run: {TAKEN}"] * ranks
    assert folder.databases() == ["run/rank-0.db"]
    # Where the environment alone brings the rules in, nobody looks before all ranks have begun.
    done = folder.fork("train.py", ranks=2, env=variables)
    assert (done.code, done.out) == (0, "trained\n" * 2), done.err
    new = [f"run/process-2/rank-{rank}.db" for rank in (0, 1)]
    assert folder.databases() == [*new, "run/rank-0.db"]


@pytest.mark.parametrize(
    ("theirs", "attempt", "taken", "another"),
    [
        (None, "0", True, True),  # a run of a single process
        ({}, "0", False, False),  # another rank has begun
        ({"parent": "6"}, "0", True, True),
        ({"attempt": "0"}, "1", False, True),  # these ranks are started once more
        ({"host": "there", "parent": "6"}, "0", False, False),
        ({"host": "there", "launch": "there/29500/none"}, "0", True, True),
    ],
)
def test_ranks_know_the_runs_of_their_own_job(
    theirs: dict[str, str] | None,
    attempt: str,
    *,
    taken: bool,
    another: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "job", lambda: {**JOB, "attempt": attempt})
    about = {"format": 3} if theirs is None else {"format": 3, "job": {**JOB, **theirs}}
    (tmp_path / "run.json").write_text(json.dumps(about), encoding="utf-8")
    assert layout.is_taken(tmp_path) is taken
    assert layout.is_of_another_start(tmp_path) is another
    assert not layout.is_taken(tmp_path / "nothing")
    assert not layout.is_of_another_start(tmp_path / "nothing")
