"""Rules that edit weights once an update is over, against loops written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import yaml
from torch import Tensor, nn

import gradsurgeon

SCALED = """\
version: 1
rules:
  - {id: slower, action: scale, params: "0.*", tensor: update, factor: 0.1}
"""
CLAMPED = """\
version: 1
rules:
  - {id: bound, action: clamp, params: "*", tensor: value, min: -0.05, max: 0.05}
"""
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    net(batch).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("form", ["scaled", "clamped", "observed", "skipped"])
@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    ],
)
def test_weights_equal_those_of_a_loop_written_by_hand(form: str, make: Optimizers) -> None:
    net = _net()
    by_hand = copy.deepcopy(net)
    rules = CLAMPED if form == "clamped" else SCALED
    if form == "skipped":
        rules += "  - {id: trap, action: nan-trap, params: '*', then: skip-step}\n"
    mode = "observe" if form == "observed" else "act"
    optimizer = make(net)
    other = make(by_hand)
    with gradsurgeon.apply(net, yaml.safe_load(rules), mode=mode):
        for number in range(4):
            batch = torch.randn(3, 4)
            is_bad = form == "skipped" and number == 1
            if is_bad:
                _step(net, optimizer, batch * float("nan"))
                continue
            _step(net, optimizer, batch)
            before = [param.detach().clone() for param in by_hand[0].parameters()]
            _step(by_hand, other, batch)
            with torch.no_grad():
                if form == "clamped":
                    for param in by_hand.parameters():
                        param.clamp_(-0.05, 0.05)
                elif form != "observed":
                    for param, old in zip(by_hand[0].parameters(), before, strict=True):
                        param.copy_(old + (param - old) * 0.1)
            for ours, theirs in zip(net.parameters(), by_hand.parameters(), strict=True):
                assert torch.equal(ours, theirs)
