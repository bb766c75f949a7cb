"""Rules that fit nothing, in scripts that never take the step at which they would be refused."""

from __future__ import annotations

import pytest
from outside import NORMS, Folder

pytestmark = pytest.mark.slow

RULES = NORMS + "  - {id: nowhere, action: zero, params: 'decodr.*'}\n"
ERROR = "gradsurgeon: error: "
NO_STEP = """
import atexit, sys, torch
from torch import nn
atexit.register(print, "at exit")
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
"""
CAUGHT = """
import torch
from torch import nn
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    try:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_it_is_an_error_at_the_end(folder: Folder, options: tuple[str, ...]) -> None:
    done = folder.run(NO_STEP, *options, rules=RULES)
    assert done.code == 0
    assert done.out == "at exit\n"
    (said,) = [line for line in done.lines if line.startswith(ERROR)]
    assert 'rule nowhere: no parameter of the model matches "decodr.*"' in said
    assert ("--quiet" in options) == (done.lines == [said])
    # Where a rule matches what is there, nothing of the kind is said.
    if options:
        done = folder.run(NO_STEP, *options, record=False)
        assert (done.code, done.lines) == (0, [])


def test_a_script_that_catches_the_error_is_told_at_the_end(folder: Folder) -> None:
    done = folder.run(CAUGHT, rules=RULES)
    assert (done.code, done.out) == (0, "BindError\n")
    assert "gradsurgeon: Linear, 2 steps" in done.lines
    said = done.lines[-1]
    assert said.startswith(f"{ERROR}")
    assert "rule nowhere" in said
