"""CUDA graphs: rules that a replay would silence refuse to be captured; edits are replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradsurgeon
from gradsurgeon import GradSurgeonError, _torch
from gradsurgeon.compiler import compile_plan
from gradsurgeon.runtime.context import rules_lost_in_replay

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")

PARAMS = {"params": "*"}
OUTPUT = {"modules": "0", "tensor": "output.grad"}
CLAMP = {"action": "clamp", "min": -0.01, "max": 0.01}
LIVING: list[dict[str, Any]] = [
    {"id": "clamp-backward", **CLAMP, "at": "backward", **PARAMS},
    {"id": "clamp-step", **CLAMP, "at": "step", **PARAMS},
    {"id": "clip-step", "action": "clip-norm", "max_norm": 0.1, "per": "rule", **PARAMS},
    {"id": "clamp-output-grad", **CLAMP, **OUTPUT},
]
FREEZE = {"id": "freeze", "action": "freeze", **PARAMS}
SILENCED: list[dict[str, Any]] = [
    {"id": "nan-trap", "action": "nan-trap", **PARAMS},
    {"id": "nan-trap-output-grad", "action": "nan-trap", **OUTPUT},
    {"id": "spike-trap", "action": "spike-trap", "above": {"sigmas": 2.5}, **PARAMS},
    {"id": "norm-log-backward", "action": "norm-log", "at": "backward", **PARAMS},
    {"id": "norm-log-accumulated", "action": "norm-log", **PARAMS},
    {"id": "norm-log-step", "action": "norm-log", "at": "step", **PARAMS},
    {"id": "norm-log-output-grad", "action": "norm-log", **OUTPUT},
    {"id": "capture", "action": "capture", **PARAMS},
    {"id": "clamp-scheduled", **CLAMP, "at": "step", "steps": {"from": 5}, **PARAMS},
]


def by_id(rules: list[dict[str, Any]]) -> Any:
    return [pytest.param(rule, id=rule["id"]) for rule in rules]


def named(rule: dict[str, Any]) -> list[str]:
    plan = gradsurgeon.plan(made(), {"version": 1, "rules": [rule]})
    return [one for one, _ in rules_lost_in_replay(compile_plan(plan))]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize("rule", by_id(SILENCED))
def test_what_a_replay_would_silence(rule: dict[str, Any]) -> None:
    assert named(rule) == [rule["id"]]


@pytest.mark.parametrize("rule", by_id([*LIVING, FREEZE]))
def test_what_a_replay_repeats(rule: dict[str, Any]) -> None:
    assert named(rule) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_builds_without_cuda_can_be_asked() -> None:
    assert not _torch.is_capturing()


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """Return a captured train step, after the warm-up that torch asks for."""

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    return graph


@pytest.mark.cell(
    "CUDA graphs",
    "backward",
    "accumulated",
    "step",
    "modules",
    refused="rules that look (`norm-log`, `capture`, `nan-trap`, `spike-trap`) and rules with `steps`: a replay "
    "runs no Python",
)
@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("rule", by_id(SILENCED))
def test_a_rule_that_would_be_silenced_refuses(rule: dict[str, Any]) -> None:
    model = made().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        gradsurgeon.apply(model, {"version": 1, "rules": [rule]}),
        pytest.raises(GradSurgeonError, match=f"rule {rule['id']}: a CUDA graph is being captured"),
    ):
        capture(model, optimizer, torch.randn(5, 4, device="cuda"))


@pytest.mark.cell(
    "CUDA graphs",
    "backward",
    "step",
    "modules",
    differs="replays repeat the edits and count no step, no firing and no change; one notice says so",
)
@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("rule", by_id(LIVING))
def test_edits_are_replayed(rule: dict[str, Any]) -> None:
    x = torch.randn(5, 4, device="cuda")
    found = []
    for captured in (False, True):
        model = made().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsurgeon.apply(model, {"version": 1, "rules": [rule]}) as session:
            if captured:
                graph = capture(model, optimizer, x)
                graph.replay()
                graph.replay()
                assert [event.kind for event in session.events] == ["notice"]
            else:
                for _ in range(5):
                    optimizer.zero_grad(set_to_none=True)
                    model(x).square().mean().backward()
                    optimizer.step()
        found.append([param.detach().clone() for param in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
