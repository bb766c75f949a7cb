"""The commands that the guide gives for CI, in their order, and the exit codes that it says they have."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from commands import CLEAN, EDITS, call, git, pasted

pytestmark = pytest.mark.slow

NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1){more})
"""
TRAIN = """
import torch
from train.net import build

model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).sum() * {factor}).backward()
    optimizer.step()
"""
TRAP = '  - {id: trap, action: nan-trap, params: "*", then: skip-step}\n'


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a checkout whose rules are those of its main branch, with the names of its model."""
    package = tmp_path / "train"
    package.mkdir()
    # Without this file `train.net` would be looked for in the script of that name.
    (package / "__init__.py").touch()
    (package / "net.py").write_text(NET.format(more=""))
    (tmp_path / "train.py").write_text(TRAIN.format(factor=1))
    (tmp_path / "rules.yaml").write_text(CLEAN + TRAP)
    named = call("params", "--model", "train.net:build", "-o", "params.json", cwd=tmp_path)
    assert named.returncode == 0, named.stderr
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "x")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    return tmp_path


def commands() -> dict[str, list[str]]:
    """Return the arguments of each command, by its name."""
    lines = [line for line in pasted().splitlines() if line.startswith("gradsurgeon ")]
    return {words[1]: words[1:] for words in (shlex.split(line, comments=True) for line in lines)}


def run(name: str, here: Path) -> subprocess.CompletedProcess[str]:
    own, _, other = shlex.join(commands()[name]).partition(" '|' ")
    done = call(*shlex.split(own), cwd=here)
    if not other or done.returncode:
        return done
    return subprocess.run(
        shlex.split(other), input=done.stdout, capture_output=True, text=True, cwd=here, check=False
    )


def test_all_is_well_at_first(here: Path) -> None:
    assert list(commands()) == ["lint", "plan", "diff", "params", "run", "report"]
    for name in commands():
        done = run(name, here)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
    assert json.loads((here / "rules.sarif").read_text())["runs"][0]["results"] == []


def test_each_fails_as_its_comment_says(here: Path) -> None:
    said = dict(re.findall(r"^gradsurgeon (\w+) .*# (.*)$", pasted(), re.MULTILINE))
    assert list(said) == ["lint", "plan", "diff", "params", "report"]
    assert all(text.startswith("exit code 1 ") for text in said.values())
    (here / "rules.yaml").write_text((CLEAN + TRAP).replace('"*"', '"nothing.*"'))
    assert run("plan", here).returncode == 1
    (here / "rules.yaml").write_text(EDITS + TRAP)
    assert run("diff", here).returncode == 1
    (here / "train" / "net.py").write_text(NET.format(more=", nn.Linear(1, 1)"))
    assert run("params", here).returncode == 1
    (here / "train.py").write_text(TRAIN.format(factor="float('inf')"))
    assert run("run", here).returncode == 0
    done = run("report", here)
    assert done.returncode == 1
    assert re.search(r"^gradsurgeon: \d+ trap events?, first at step ", done.stderr, re.MULTILINE)
    (here / "rules.yaml").write_text(CLEAN.replace("norm-log", "norm-lg"))
    assert run("lint", here).returncode == 1
    (result,) = json.loads((here / "rules.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "unknown-action"
