"""What the launcher replaces for a while, a script may replace as well: its wrappers stay, and are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import Folder

pytestmark = pytest.mark.slow

WRAPS = """
import torch
from torch import nn
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
calls, backward = [], torch.autograd.backward
def mine(*args, **kwargs):
    calls.append(1)
    return backward(*args, **kwargs)
torch.autograd.backward = mine
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print(len(calls), torch.autograd.backward is mine)
"""
BY_HAND = """
import torch
from torch import nn
model = nn.Linear(2, 1)
calls = []
for step in range(4):
    backward = torch.autograd.backward
    def mine(*args, **kwargs):
        calls.append(1)
        return backward(*args, **kwargs)
    torch.autograd.backward = mine
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    torch.autograd.backward = backward
    {update}
print(len(calls), torch.autograd.backward is backward)
"""
UPDATE = "model.weight.data.sub_(model.weight.grad)"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.cover_children
def test_a_wrapper_of_the_script_around_backward_stays(folder: Folder) -> None:
    done = folder.run(WRAPS)
    assert (done.code, done.out) == (0, "3 True\n"), done.lines
    assert folder.steps("weight") == [0, 1, 2]


@pytest.mark.parametrize("update", [UPDATE, f"if step >= 2: {UPDATE}"], ids=["all", "the last two"])
def test_a_wrapper_that_comes_and_goes_hides_no_pass(folder: Folder, update: str) -> None:
    done = folder.run(BY_HAND.format(update=update))
    assert (done.code, done.out) == (0, "4 True\n"), done.lines
    assert folder.steps("weight") == ([0, 1, 2, 3] if update == UPDATE else [0, 1])
    assert done.headers() == [
        f"gradsurgeon: {folder.path}/rules.yaml on Linear (2 parameters, 3 elements)"
    ]
