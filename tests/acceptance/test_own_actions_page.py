"""The page of five own actions: their numbers are those of loops written by hand, and each command takes them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import guide
import pytest
import torch
import yaml
from commands import call
from small import net
from torch import Tensor

import gradsurgeon
from gradsurgeon import actions

PAGE = guide.text("own_actions")
FILES = guide.named(PAGE)
RULES = {rule["id"]: rule for rule in yaml.safe_load(FILES["own_edits.yaml"])["rules"]}
SCRIPT = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
"""
MAX_LINES = 10
UPDATES = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return what a reader of the page has, with what earlier tasks have left."""
    guide.write_files(PAGE, tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "old.yaml").write_text(
        'version: 1\nrules: [{id: norms, action: norm-log, params: "*"}]\n'
    )
    torch.manual_seed(5)
    old, fisher, bases = {}, {}, {}
    for name, param in net().named_parameters():
        old[name] = torch.randn_like(param)
        fisher[name] = torch.rand_like(param)
        if param.dim() > 1:
            bases[name] = torch.linalg.qr(torch.randn(param.shape[1], 1))[0]
    torch.save((old, fisher), tmp_path / "task.pt")
    torch.save(bases, tmp_path / "bases.pt")
    return tmp_path


@pytest.fixture
def imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = dict(actions.known_actions)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    __import__("own_edits")
    yield
    del sys.modules["own_edits"]
    actions.known_actions.clear()
    actions.known_actions.update(known)


def largest(grad: Tensor, _name: str, _weight: Tensor) -> Tensor:
    numbers = grad.flatten().tolist()
    order = sorted(range(len(numbers)), key=lambda place: -abs(numbers[place]))
    for place in order[3:]:
        numbers[place] = 0.0
    return torch.tensor(numbers).view(grad.shape)


def signs(grad: Tensor, _name: str, _weight: Tensor) -> Tensor:
    return (grad > 0).float() - (grad < 0).float()


def apart(grad: Tensor, name: str, _weight: Tensor) -> Tensor:
    if grad.dim() == 1:
        return grad
    (basis,) = torch.load("bases.pt")[name].T
    return torch.stack([row - (row * basis).sum() * basis for row in grad])


def remember(grad: Tensor, name: str, weight: Tensor) -> Tensor:
    """Let autograd derive the penalty of the paper."""
    old, fisher = torch.load("task.pt")
    free = weight.detach().clone().requires_grad_()
    (10 / 2 * (fisher[name] * (free - old[name]) ** 2).sum()).backward()
    assert free.grad is not None
    return grad + free.grad


def rounded(grad: Tensor, _name: str, _weight: Tensor) -> Tensor:
    level = max(abs(number) for number in grad.flatten().tolist()) / 127
    numbers = [round(number / level) * level for number in grad.flatten().tolist()]
    return torch.tensor(numbers).view(grad.shape)


HAND: Mapping[str, Callable[[Tensor, str, Tensor], Tensor]] = {
    "largest": largest,
    "signs": signs,
    "apart": apart,
    "remember": remember,
    "rounded": rounded,
}


def train(rule: str, hand: Callable[[Tensor, str, Tensor], Tensor] | None) -> list[Tensor]:
    """Train with a rule of the page, or by hand; return the weights."""
    model: Any = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    if hand is None:
        document = {"version": 1, "rules": [RULES[rule]]}
        gradsurgeon.apply(model, document, optimizer=optimizer)
    torch.manual_seed(1)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        if hand is not None:
            for name, param in model.named_parameters():
                param.grad = hand(param.grad, name, param)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("rule", RULES)
def test_numbers_are_those_of_a_loop_by_hand(rule: str) -> None:
    wanted = train(rule, HAND[rule])
    for got, one in zip(train(rule, None), wanted, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=2e-6)
    plain = train(rule, lambda grad, _name, _weight: grad)
    assert not all(map(torch.allclose, plain, wanted))


def test_each_is_at_most_ten_lines() -> None:
    classes = [
        node for node in ast.parse(FILES["own_edits.py"]).body if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) == len(HAND)
    for node in classes:
        lines = [line for line in ast.unparse(node).splitlines() if line.strip()]
        assert len(lines) <= MAX_LINES, node.name


@pytest.mark.slow
def test_commands_of_the_page_run(folder: Path) -> None:
    lines = re.findall(r"^gradsurgeon (.*)$", PAGE, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["lint", "plan", "diff", "run"]
    for line in lines:
        done = call(*line.split(), cwd=folder)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
