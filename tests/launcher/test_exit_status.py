"""A script that exits by itself under `gradsurgeon run`: the report tells the status, unless training went on."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import Folder

import gradsurgeon
from gradsurgeon.report import from_run

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
train()
"""
CAUGHT = "try:\n    sys.exit(3)\nexcept SystemExit:\n    train()\n"
THREAD = "import threading\nthread = threading.Thread(target=sys.exit, args=(3,))\nthread.start(); thread.join()\n"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(3)", 3, "broken: stopped by SystemExit, exit status 3"),
        ("sys.exit('no data')", 1, "broken: stopped by SystemExit, exit status 1"),
        ("sys.exit(0)", 0, "fine: ended, clean"),
        (CAUGHT, 0, "fine: ended, clean"),
        (THREAD, 0, "fine: ended, clean"),
        ("raise KeyError('x')", 1, "broken: stopped by KeyError"),
    ],
)
def test_the_status_of_a_script_is_told(tmp_path: Path, end: str, status: int, said: str) -> None:
    done = Folder(tmp_path).run(f"{SCRIPT}\n{end}\n")
    assert done.code == status, done.err
    with gradsurgeon.open_run(tmp_path / "run") as run:
        assert from_run(run).head[0] == said
