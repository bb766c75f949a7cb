"""Rules that fit nothing, in scripts that never take the step at which they would be refused."""

from __future__ import annotations

from pathlib import Path

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
{end}
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


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.parametrize(
    ("options", "code"), [((), 0), (("--quiet",), 0), (("--quiet", "--strict"), 2)]
)
def test_it_is_an_error_at_the_end(folder: Folder, options: tuple[str, ...], code: int) -> None:
    done = folder.run(NO_STEP.format(end=""), *options, rules=RULES)
    assert done.code == code
    assert done.out == "at exit\n"
    (said,) = [line for line in done.lines if line.startswith(ERROR)]
    assert 'rule nowhere: no parameter of the model matches "decodr.*"' in said
    assert ("--quiet" in options) == (done.lines == [said])
    # Where a rule matches what is there, nothing of the kind is said.
    if options:
        done = folder.run(NO_STEP.format(end=""), *options, record=False)
        assert (done.code, done.lines) == (0, [])


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise KeyError('of its own')", 1),
        ("import os; os._exit(0)", 2),
        ("import os; os._exit(5)", 5),
    ],
)
def test_a_script_that_fails_by_itself_keeps_its_exit_code(
    folder: Folder, end: str, code: int
) -> None:
    done = folder.run(NO_STEP.format(end=end), "--strict", rules=RULES)
    assert done.code == code
    assert sum(line.startswith(ERROR) for line in done.lines) == 1


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 2)])
def test_a_script_that_catches_the_error_is_told_at_the_end(
    folder: Folder, options: tuple[str, ...], code: int
) -> None:
    done = folder.run(CAUGHT, *options, rules=RULES)
    assert (done.code, done.out) == (code, "BindError\n")
    assert "gradsurgeon: Linear, 2 steps" in done.lines
    said = done.lines[-1]
    assert said.startswith(f"{ERROR}")
    assert "rule nowhere" in said


def test_strict_tells_by_the_exit_code_that_no_rule_acted(folder: Folder) -> None:
    assert folder.run("import torch", "--strict").code == 2
    assert folder.run("import torch").code == 0
