"""`run --pdb` where a trap does not simply end the main thread: the debugger opens, or somebody says why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import environment

pytestmark = pytest.mark.slow

TRAIN = """
import atexit, os, sys, threading, time, torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
def train(wrap=lambda model: model, trapped=True):
    model = wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        factor = float("nan") if trapped and step == 1 else 1.0
        (model(torch.ones(1, 2)).sum() * factor).backward()
        optimizer.step()
def work(rank):
    train()
"""
OPENED = "gradsurgeon: the trap stopped the update: the debugger is in the line that took the step"


STORY = Path(__file__).parents[2] / "rules" / "stories" / "went_nan.py"


def start(folder: Path, script: str, *launch: str) -> subprocess.Popen[str]:
    rules = "version: 1\nrules:\n  - {id: trap, action: nan-trap, params: '*'}\n"
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN + script, encoding="utf-8")
    (folder / "tmp").mkdir()
    own = ["-m", "gradsurgeon", "run", "--rules", "rules.yaml", "--pdb", *launch, "train.py"]
    return subprocess.Popen(
        [sys.executable, *own],
        cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


BEHIND = """
try:
    train()
except Exception as error:
    raise KeyError("training failed") from error
"""


@pytest.mark.cover_children
def test_the_debugger_opens_behind_another_error(tmp_path: Path) -> None:
    started = start(tmp_path, BEHIND)
    out, err = started.communicate("p step, type(optimizer).__name__\nq\n", timeout=TIMEOUT)
    assert "(Pdb) (1, 'SGD')" in out, err
    assert any(line.startswith(OPENED) for line in err.splitlines())


@pytest.mark.cover_children
def test_the_debugger_opens_where_the_nan_was_born_then_at_the_update(tmp_path: Path) -> None:
    started = start(tmp_path, STORY.read_text(encoding="utf-8"))
    asked = "p operation, bool(output.isnan().any()), q.shape[0]\nq\np step, type(optimizer).__name__\nq\n"
    out, err = started.communicate(asked, timeout=TIMEOUT)
    assert "(Pdb) ('aten._softmax', True, 16)" in out, err
    assert out.index("-> out: Tensor = self.out(scores.softmax") < out.index("-> optimizer.step()")
    assert "(Pdb) (112, 'AdamW')" in out
