"""`torch.compile` and rules on parameters: they act whenever they come, and nothing is recompiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import data
from pairs import slow
from ranks import Json
from small import hold_rows, net, rule_file, take_step
from torch import Tensor

import gradsurgeon
from gradsurgeon import NonFiniteGradientError

RULES: Json = rule_file(
    {"id": "early", "action": "clamp", "params": "0.*", "at": "backward", "max": 0.05},
    {"id": "late", "action": "clip-norm", "params": "*", "max_norm": 0.1, "per": "rule"},
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "trap", "action": "nan-trap", "params": "*"},
)
WAYS = ["not compiled", "before", "after", "after the first call", "a submodule", "in place"]


def run(way: str, rules: Any = RULES) -> tuple[list[Tensor], list[tuple[int, float]]]:
    torch._dynamo.reset()
    model: Any = net()
    params = list(model.parameters())
    session = gradsurgeon.apply(model, rules) if way == "before" else None
    called: Any = model
    if way in ("before", "after", "after the first call"):
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif way == "a submodule":
        model[2] = torch.compile(model[2], backend="aot_eager")
    elif way == "in place":
        model.compile(backend="aot_eager")
    if way == "after the first call":
        called(data(99, 5, 4)).sum().backward()
        model.zero_grad()
    if session is None:
        session = gradsurgeon.apply(called, rules)
    optimizer = torch.optim.SGD(params, lr=0.3)
    frames = []
    for step in range(4):
        take_step(optimizer, called(data(step, 5, 4)).square().mean())
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert frames[0] == frames[-1], "recompiled from step to step"
    with session:
        norms = session.history("0.weight", rule="norms")
        if way != "not compiled":
            with pytest.raises(NonFiniteGradientError):
                (called(data(0, 5, 4)) * float("nan")).sum().backward()
                optimizer.step()
    return [param.detach().clone() for param in params], norms


# Tracing a submodule, torch looks at the gradient of its input, and warns about its own doing.
@pytest.mark.cell("`torch.compile`, rules first", "backward", "accumulated", "step")
@pytest.mark.cell("`torch.compile`, rules after the first call", "backward", "accumulated", "step")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", ["before", "after the first call", *slow(*WAYS[2::2], "in place")])
def test_rules_on_parameters_act_as_without_compilation(way: str) -> None:
    wanted, wanted_norms = run("not compiled")
    found, norms = run(way)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-06)
    assert len(norms) == 4
    hold_rows(norms, wanted_norms, rel=1e-5)


def test_the_rules_bite() -> None:
    nothing = rule_file(*RULES["rules"][2:3])
    bare, _ = run("not compiled", nothing)
    wanted, _ = run("not compiled")
    assert max((a - b).abs().max().item() for a, b in zip(bare, wanted, strict=True)) > 1e-3
