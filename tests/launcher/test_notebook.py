"""`apply` where cells are run again and again in one namespace, as in a notebook."""

from __future__ import annotations

import pytest
from ranks import Json

import gradsurgeon
from gradsurgeon import GradSurgeonError

MODEL = """
import torch
from torch import nn
import gradsurgeon
torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
APPLY = """
session = gradsurgeon.apply(model, {"version": 1, "rules": [
    {"id": "half", "action": "scale", "params": "*", "factor": 0.5, "at": "step"},
    {"id": "norms", "action": "norm-log", "params": "*"},
]}%s)
"""
TRAIN = """
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_cells_may_be_run_again() -> None:
    cells: Json = {}
    for cell in (MODEL, APPLY % "", TRAIN):
        exec(cell, cells)
    assert cells["model"].weight.grad.tolist() == [[0.5, 0.5]]
    with pytest.raises(GradSurgeonError, match="replace=True"):
        exec(APPLY % "", cells)
    first = cells["session"]
    exec(APPLY % ", replace=True", cells)
    exec(TRAIN, cells)
    # Halved once, not twice; and what was recorded before is still there.
    assert cells["model"].weight.grad.tolist() == [[0.5, 0.5]]
    assert [step for step, _ in first.history("weight")] == [0, 1, 2]
    # A model that is built again leaves nothing behind that acts on the new one.
    for cell in (MODEL, TRAIN):
        exec(cell, cells)
    assert cells["model"].weight.grad.tolist() == [[1.0, 1.0]]
    for cell in (APPLY % "", TRAIN):
        exec(cell, cells)
    assert cells["session"].status()["half"].fired == 6
    gradsurgeon.remove(cells["model"])
