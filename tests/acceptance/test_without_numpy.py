"""An installation without numpy: rules, records and events work, and what shows norms names the extra."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from commands import CLEAN, EDITS, call, environment
from runs import write

from gradsurgeon import Event

pytestmark = pytest.mark.slow

EXTRA = "pip install 'gradsurgeon[report]'"

TRAIN = """
import gradsurgeon, torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""

IN_PYTHON = f"""{TRAIN}
import sys
with gradsurgeon.apply(model, "rules.yaml", optimizer=optimizer, record="run") as session:
    train()
    print(len(session.history("bias")), session.latest("bias") > 0)
with gradsurgeon.open_run("run") as run:
    print(run.events, len(run.history("bias")), run.latest("bias") > 0)
    print(repr(run).splitlines()[1])
try:
    print(gradsurgeon.report.summary(session))
except gradsurgeon.GradSurgeonError as error:
    print(error)
assert sys.modules["numpy"] is None
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose processes, and their children, cannot import numpy."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['numpy'] = None\n")
    known = environment().get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(site), known, *filter(None, sys.path)]))
    return {"PYTHONPATH": path}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "rules.yaml").write_text(CLEAN)
    (folder / "edits.yaml").write_text(EDITS)
    (folder / "train.py").write_text(f"{TRAIN}\ntrain()\n")
    (folder / "model.py").write_text("from torch import nn\ndef build(): return nn.Linear(3, 1)\n")
    writer = write(folder / "trapped", {"a": [1.0] * 30})
    writer.event(Event("trap", "trap", 3, 0, "a", "step 3: bad"))
    writer.close()
    return folder


def test_in_a_script(work: Path, env: dict[str, str]) -> None:
    done = call(cwd=work, code=IN_PYTHON, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["4 True", "[] 4 True", "fine: ended, clean"]
    assert EXTRA in lines[3]


def test_in_a_launched_script(work: Path, env: dict[str, str]) -> None:
    done = call("run", "--rules", "rules.yaml", "--record", "run", "train.py", cwd=work, env=env)
    assert done.returncode == 0, done.stderr
    assert "gradsurgeon: Linear, 4 steps" in done.stderr
    assert "fired 8" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_pull_request_needs(work: Path, env: dict[str, str]) -> None:
    for command in (
        ("lint", "rules.yaml"),
        ("diff", "rules.yaml", "edits.yaml", "--model", "model:build"),
        ("export", "trapped", "--format", "csv"),
    ):
        done = call(*command, cwd=work, env=env)
        assert done.returncode == 0, (command, done.stderr)
        assert EXTRA not in done.stderr


@pytest.mark.parametrize(("kind", "code"), [("trap", 1), ("notice", 0)])
def test_a_job_fails_by_events(work: Path, env: dict[str, str], kind: str, code: int) -> None:
    done = call("report", "trapped", "--fail-on", kind, cwd=work, env=env)
    assert done.returncode == code
    assert EXTRA in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[:2] == ["look: step 3: bad", "ended, traps tripped in 1 step"]
    assert "  step 3  trap  trap  a" in done.stdout
    assert ("1 trap event, first at step 3" in done.stderr) == bool(code)


@pytest.mark.parametrize(
    "command",
    [
        ("report", "trapped"),
        ("report", "trapped", "--format", "json"),
        ("report", "trapped", "--html", "page.html"),
        ("watch", "trapped"),
        ("compare", "trapped", "trapped"),
    ],
)
def test_what_needs_it_names_the_extra(
    work: Path, env: dict[str, str], command: tuple[str, ...]
) -> None:
    done = call(*command, cwd=work, env=env)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(EXTRA)
    assert "Traceback" not in done.stderr
    assert not (work / "page.html").exists()
