"""P9 on CUDA: outside of a flush and of the decision of a trap nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models import data
from small import sgd, tanh_net
from torch import nn

import gradsurgeon

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="waiting for a device needs a CUDA device"
    ),
    # Torch says so once in a process that uses the mode.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

OBSERVING = """
version: 1
rules:
  - {id: after, action: norm-log, params: "*", stats: [l1, l2, linf, mean, std, zeros, nonfinite]}
  - {id: some, action: norm-log, params: "*.weight"}
  - {id: each, action: norm-log, params: "*", at: backward}
  - {id: final, action: norm-log, params: "*", at: step}
  - {id: outputs, action: norm-log, modules: "*", tensor: output}
  - {id: grads, action: norm-log, modules: "*", tensor: output.grad}
"""
EDITING = """
  - {id: bound, action: clamp, params: "*", at: step, min: -1.0, max: 1.0}
  - {id: early, action: clamp, params: "*", at: backward, max: 1.0}
  - {id: clip, action: clip-norm, params: "*.weight", at: step, max_norm: 1.0, per: rule}
  - {id: scaled, action: scale, params: "*", factor: 0.5}
"""


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(rules: str) -> gradsurgeon.Session:
    torch.manual_seed(0)
    model = tanh_net(4, 6, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    inputs = [data(number, 5, 4).cuda() for number in range(60)]

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(inputs[number]).square().mean().backward()
        optimizer.step()

    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        # Hooks, counters and the state of the optimizer come into being.
        step(0)
        torch.cuda.synchronize()
        with no_waiting():
            for number in range(1, 60):
                step(number)
    return session


def test_the_mode_finds_a_wait() -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").sum().item()


def test_observing_waits_for_nothing() -> None:
    session = train(OBSERVING)
    assert len(session.history("0.weight", rule="final")) == 60
    assert len(session.history("2.bias", "nonfinite", rule="after")) == 60


def test_editing_waits_for_nothing() -> None:
    session = train(OBSERVING + EDITING)
    assert session.events == []


def test_a_fingerprint_waits_for_nothing() -> None:
    session = train("gradsurgeon:fingerprint@1")
    assert session.events == []


def test_many_rows_per_step_wait_for_nothing() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200))).cuda()
    optimizer = sgd(model, 0.01)
    x = data(0, 5, 4).cuda()

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with gradsurgeon.apply(model, OBSERVING, optimizer=optimizer) as session:
        step()
        torch.cuda.synchronize()
        with no_waiting():
            for _ in range(4):
                step()
    assert len(session.history("0", rule="outputs")) == 5
    assert len(session.history("199", rule="grads")) == 5


def test_rows_land_in_pinned_memory() -> None:
    from gradsurgeon.tensors import _torch

    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.arange(8, dtype=torch.float32, device=device)
    with no_waiting():
        arrival = _torch.send([source[:3], source[3:]])
    landed = arrival.wait()
    assert arrival.done()
    assert [part.is_pinned() for part in landed] == [True, True]
    assert [part.tolist() for part in landed] == [[0, 1, 2], [3, 4, 5, 6, 7]]
