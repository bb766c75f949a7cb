"""Numbers of rules that change with the update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small import edited, rule_file, sgd
from torch import nn

import gradsurgeon

# With the meaning of a progress from 0 to 1, by hand.
SHAPES = {
    "linear": lambda p: p,
    "cosine": lambda p: (1 - math.cos(math.pi * p)) / 2,
    "sigmoid": lambda p: 2 / (1 + math.exp(-10 * p)) - 1,
}


def factors(rule: dict[str, Any], updates: int) -> list[float]:
    """Return by what a rule multiplies a gradient in each update."""
    return [grad[0].item() for grad in edited(rule, (2,), 1.0, updates)]


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_factor_follows_its_formula(shape: str, at: str) -> None:
    ramp = {"from": 0.5, "to": -1.0, "steps": 4, "shape": shape}
    found = factors({"action": "scale", "factor": ramp, "at": at}, 7)
    wanted = [0.5 - 1.5 * SHAPES[shape](min(step / 4, 1)) for step in range(7)]
    assert found[:4] == pytest.approx(wanted[:4])
    # Exactly, from the end on.
    assert found[4:] == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("steps", "start_step", "wanted"),
    [
        ({}, None, [0.0, 0.5, 1.0, 1.0, 1.0]),
        ({"from": 1}, None, [1.0, 0.0, 0.5, 1.0, 1.0]),
        ({}, 2, [0.0, 0.0, 0.0, 0.5, 1.0]),
        ({"from": 1}, 2, [1.0, 0.0, 0.0, 0.5, 1.0]),
    ],
)
def test_a_ramp_begins_with_its_rule_or_where_it_says(
    steps: dict[str, int], start_step: int | None, wanted: list[float]
) -> None:
    ramp: dict[str, Any] = {"from": 0.0, "to": 1.0, "steps": 2}
    if start_step is not None:
        ramp["start_step"] = start_step
    assert factors({"action": "scale", "factor": ramp, "at": "step", "steps": steps}, 5) == wanted


def test_bounds_and_norms_follow_ramps() -> None:
    ramp = {"from": 1.0, "to": 0.25, "steps": 3}
    wanted = [1.0, 0.75, 0.5, 0.25]
    clamp = factors({"action": "clamp", "at": "step", "max": ramp}, 4)
    assert clamp == pytest.approx(wanted)
    clip = factors({"action": "clip-norm", "max_norm": ramp, "norm_type": "inf"}, 4)
    assert clip == pytest.approx(wanted, rel=1e-5)


def test_two_optimizers_have_ramps_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    first = sgd(model[0], 0.0)
    second = sgd(model[1], 0.0)
    ramp = {"from": 1.0, "to": 0.0, "steps": 2}
    rules = rule_file({"id": "it", "action": "scale", "params": "*", "factor": ramp, "at": "step"})
    norms = []
    with gradsurgeon.apply(model, rules, optimizer=[first, second]):
        for update in range(3):
            model(torch.ones(1, 2)).sum().backward()
            first.step()
            if update == 2:
                second.step()
            norms.append([param.grad.any().item() for param in model.parameters()])  # type: ignore[union-attr]
            model.zero_grad()
    # The second optimizer is at its first update when the first is at its third.
    assert norms == [[True, True], [True, True], [False, True]]


def test_a_ramp_that_crosses_bounds_is_refused() -> None:
    rule = {"id": "it", "action": "clamp", "params": "*", "at": "step", "min": 0.5}
    rule["max"] = {"from": 1.0, "to": 0.0, "steps": 3}
    with pytest.raises(gradsurgeon.RuleFileError, match=r"min \(0.5\) is greater than max \(0\)"):
        gradsurgeon.load(rule_file(rule))


def test_the_plan_says_where_it_goes() -> None:
    ramp = {"from": 0, "to": -1, "steps": 10_000, "shape": "sigmoid", "start_step": 5}
    rules = rule_file({"id": "it", "action": "scale", "params": "*", "factor": ramp})
    shown = str(gradsurgeon.plan(nn.Linear(2, 2), rules))
    assert "it: `factor` goes from 0 to -1 in steps 5 to 10,005 (sigmoid)" in shown
