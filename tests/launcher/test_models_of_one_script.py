"""Several models whose parameters have the same names are told apart wherever they are spoken of."""

from __future__ import annotations

import json

import pytest
from outside import Folder
from small import fields_of

import gradsurgeon

pytestmark = pytest.mark.slow

PAIR = """
import sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.body = nn.Linear(2, size)
    def forward(self, x):
        return self.body(x)
torch.manual_seed(0)
pair = Net(3), Net(1)
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in pair]
for step in range(3):
    for net, optimizer in zip(pair, optimizers):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().mul(float("nan") if (net, step) == (pair[{bad}], 1) else 1).backward()
        optimizer.step()
"""
TRAP = """  - {id: late, action: norm-log, params: '*', steps: {from: 100}}
  - {id: norms, action: norm-log, params: '*'}
  - {id: trap, action: nan-trap, params: '*'}
"""


def report(folder: Folder, *words: str) -> list[str]:
    done = folder.fork("-m", "gradsurgeon", "report", *words)
    assert done.code == 0, done.err
    return done.out.splitlines()


@pytest.mark.parametrize(("bad", "title"), [(0, "Net"), (1, "Net-2")])
def test_a_trap_names_the_model(folder: Folder, bad: int, title: str) -> None:
    done = folder.run(PAIR.format(bad=bad), rules=TRAP)
    assert done.code == 1
    head = f"NonFiniteGradientError: step 1, rule trap, model {title}: 2 of 2 gradients"
    assert sum(head in line for line in done.lines) == 1, done.lines
    if bad:
        return
    # What is found out at the end is in the records of each.
    for place in ("run", "run/Net-2"):
        with gradsurgeon.open_run(folder.path / place) as run:
            never = fields_of(run, "rule", kind="never-fired")
        assert never == ["late"], place
    # A report says which of them it is of, and which others there are.
    own, other = report(folder, "run"), report(folder, "run/Net-2")
    for lines, name in ((own, "Net"), (other, "Net-2")):
        assert lines[0].startswith("broken: stopped at step ")
        assert any(f" on {name}: " in line for line in lines if line.startswith("summary: "))
    assert own[-2] == "1 run inside run, of other models or processes:"
    assert own[-1] == "  gradsurgeon report run/Net-2"
    assert not any("inside" in line for line in other)
    # Those of several processes lie side by side.
    (folder.path / "run").rename(folder.path / "process-2")
    (folder.path / "run").mkdir()
    (folder.path / "process-2").rename(folder.path / "run" / "process-2")
    head, *commands = report(folder, "run")
    assert head.startswith("2 runs inside run")
    assert [line.split()[2] for line in commands] == ["run/process-2", "run/process-2/Net-2"]


def test_an_expectation_that_is_not_met_names_the_models(folder: Folder) -> None:
    rule = "  - {id: all, action: norm-log, params: '*', expect: {params: 5}}\n"
    done = folder.run(PAIR.format(bad=0), rules=rule)
    assert done.code == 1
    names = "(Net: body.weight, Net: body.bias, Net-2: body.weight and 1 more)"
    assert f"rule all: expected 5 parameters, matched 4 {names};" in done.lines[-1]
    rule = "  - {id: head, action: norm-log, params: 'head.*'}\n"
    done = folder.run(PAIR.format(bad=0), rules=rule)
    assert 'no parameter of the models Net, Net-2 matches "head.*"' in done.lines[-1]


def test_a_dry_run_has_a_plan_for_each(folder: Folder) -> None:
    done = folder.run(PAIR.format(bad=0), "--dry-run", record=False)
    plans = [line for line in done.out.splitlines() if line.startswith("plan: ")]
    assert [line.split(" on ")[1].split(":")[0] for line in plans] == ["Net", "Net-2"]
    files = [folder.path / name for name in ("params.json", "params.Net-2.json")]
    shapes = [json.loads(file.read_text())["params"][0]["shape"] for file in files]
    assert shapes == [[3, 2], [1, 2]]


def test_a_header_says_once_that_a_rule_fits_nothing_here(folder: Folder) -> None:
    script = """
import torch
from torch import nn
pair = nn.Linear(1, 1, bias=False), nn.Sequential(nn.Linear(1, 1))
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in pair]
for net, optimizer in zip(pair, optimizers):
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
"""
    done = folder.run(script, rules="  - {id: cut, action: zero, params: '0.bias'}\n", record=False)
    assert done.code == 0, done.lines
    first, second = (i for i, line in enumerate(done.lines) if " updated by " in line)
    assert "on Linear (1 parameter, 1 element, updated by SGD)" in done.lines[first]
    assert done.lines[first + 1 : second] == ["  cut  zero  at backward  nothing in this model"]
    assert "on Sequential (2 parameters, 2 elements, updated by SGD)" in done.lines[second]
    assert done.lines[second + 1 : second + 3] == [
        "  cut  zero  at backward  1 parameter",
        "  note: cut: zero is not freeze: weight decay and momentum still move the weight",
    ]
