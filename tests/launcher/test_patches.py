"""What the launcher replaces for a while, a script may replace as well: its wrappers stay, and are called."""

from __future__ import annotations

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


@pytest.mark.cover_children
def test_a_wrapper_of_the_script_around_backward_stays(folder: Folder) -> None:
    done = folder.run(WRAPS)
    assert (done.code, done.out) == (0, "3 True\n"), done.lines
    assert folder.steps("weight") == [0, 1, 2]
