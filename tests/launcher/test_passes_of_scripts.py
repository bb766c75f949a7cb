"""Backward passes that come before an optimizer count for nothing; parameters that none reaches are named."""

from __future__ import annotations

import pytest
from outside import NORMS, Folder

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

HALF = (
    "  - {id: half, action: scale, factor: 0.5, params: '*', at: step, steps: {from: 0, to: 1}}\n"
)
FREEZE = "  - {id: still, action: freeze, params: '*.bias'}\n"


ANALYSED = """
import torch
from torch import nn
torch.manual_seed(0)
encoder = nn.Linear(2, 2)
x = torch.ones(1, 2, requires_grad=True)
for _ in range(3):
    encoder(x).sum().backward()
encoder.zero_grad()
print("analysed")
model = nn.Sequential(encoder, nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print("step", step)
print([param.tolist() for param in model.parameters()])
"""


@pytest.mark.parametrize("params", ["1.*", "*"])
def test_a_model_that_is_only_analysed_is_none_that_is_trained(folder: Folder, params: str) -> None:
    done = folder.run(ANALYSED, rules=f"  - {{id: norms, action: norm-log, params: '{params}'}}\n")
    assert done.code == 0, done.lines
    (header,) = done.headers()
    assert header.endswith("on Sequential (4 parameters, 9 elements, updated by SGD)")
    assert folder.databases() == ["run/rank-0.db"]
    assert folder.steps("1.weight") == [0, 1, 2]
    assert "gradsurgeon: Sequential, 3 steps" in done.lines


def test_rules_are_checked_at_the_first_step_of_an_optimizer_all_the_same(folder: Folder) -> None:
    done = folder.run(
        ANALYSED, rules=f"{NORMS}  - {{id: gone, action: zero, params: 'decodr.*'}}\n"
    )
    assert done.code == 1
    assert done.out == "analysed\n"
    assert any(
        'rule gone: no parameter of the model matches "decodr.*"' in one for one in done.lines
    )
    assert "the model has 4 names" in done.lines[-1]


# The same model before and after, and an optimizer that comes at different moments.
SAME = """
import torch, gradsurgeon
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
def forth():
    return model(torch.ones(1, 2)).square().sum()
{before}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{after}
for step in range(2):
    optimizer.zero_grad()
    forth().backward()
    optimizer.step()
print([param.tolist() for param in model.parameters()])
"""


def test_steps_count_from_the_first_of_the_optimizer(folder: Folder) -> None:
    rules = NORMS + HALF + FREEZE
    done = folder.run(
        SAME.format(before="for _ in range(3): forth().backward()", after=""), rules=rules
    )
    assert done.code == 0, done.lines
    inside = "gradsurgeon.apply(model, 'rules.yaml')"
    expected = folder.run(SAME.format(before="", after=inside), rules=rules, record=False, env=OFF)
    assert expected.code == 0, expected.lines
    assert done.out == expected.out
    (header,) = done.headers()
    assert header.endswith("on Sequential (4 parameters, 9 elements, updated by SGD)")
    assert folder.steps("1.weight") == [0, 1]
    assert "gradsurgeon: Sequential, 2 steps" in done.lines


OFF = {"GRADSURGEON_DISABLE": "1"}

DROPPED = """
import weakref
import torch
from torch import nn
seen = nn.Linear(2, 1)
seen(torch.ones(1, 2)).sum().backward()
gone = weakref.ref(seen.weight)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
del seen
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("gone" if gone() is None else "kept")
"""


def test_a_model_that_only_a_pass_has_reached_is_let_go_of(folder: Folder) -> None:
    done = folder.run(DROPPED)
    assert (done.code, done.out) == (0, "gone\n"), done.lines


# A head that nothing reaches, one that a later step reaches, and two that are frozen.
REACHED_LATE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("trunk", "apart", "late", "frozen", "then")})
model["frozen"].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model["then"].requires_grad_(False)
for step in range(3):
    optimizer.zero_grad()
    names = ["trunk", "late"] if step == 2 else ["trunk"]
    sum(model[name](torch.ones(1, 2)).sum() for name in names).backward()
    optimizer.step()
"""


def test_parameters_that_no_pass_reached_are_named(folder: Folder) -> None:
    done = folder.run(REACHED_LATE, rules=NORMS)
    assert done.code == 0, done.lines
    told = [line for line in done.lines if "never got" in line]
    assert told == ["    never got a gradient: apart.weight, apart.bias"]
