"""`run --pdb` where a trap does not simply end the main thread: the debugger opens, or somebody says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import Folder, Launched

pytestmark = pytest.mark.slow

TRAP = "  - {id: trap, action: nan-trap, params: '*'}\n"
STORY = Path(__file__).parents[2] / "rules" / "stories" / "went_nan.py"
BEHIND = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(3):
        optimizer.zero_grad()
        factor = float("nan") if step == 1 else 1.0
        (model(torch.ones(1, 2)).sum() * factor).backward()
        optimizer.step()
except Exception as error:
    raise KeyError("training failed") from error
"""
OPENED = "gradsurgeon: the trap stopped the update: the debugger is in the line that took the step"


def debugged(folder: Path, script: str, asked: str) -> Launched:
    """Run a script with a trap, and ask the debugger that opens."""
    return Folder(folder).run(script, "--pdb", rules=TRAP, record=False, stdin=asked)


@pytest.mark.cover_children
def test_the_debugger_opens_behind_another_error(tmp_path: Path) -> None:
    done = debugged(tmp_path, BEHIND, "p step, type(optimizer).__name__\nq\n")
    assert "(Pdb) (1, 'SGD')" in done.out, done.err
    assert any(line.startswith(OPENED) for line in done.lines)


@pytest.mark.cover_children
def test_the_debugger_opens_where_the_nan_was_born_then_at_the_update(tmp_path: Path) -> None:
    asked = "p operation, bool(output.isnan().any()), q.shape[0]\nq\np step, type(optimizer).__name__\nq\n"
    out = debugged(tmp_path, STORY.read_text(encoding="utf-8"), asked).out
    assert "(Pdb) ('aten._softmax', True, 16)" in out
    assert out.index("-> out: Tensor = self.out(scores.softmax") < out.index("-> optimizer.step()")
    assert "(Pdb) (112, 'AdamW')" in out
