"""Numbers of rules that change with the update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import guide
import pytest
import torch
import yaml
from models import data
from small import attach, edited, equal, linears, rule_file, sgd, take_step, weights_of
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
    ("steps", "start", "wanted"),
    [
        ({}, {}, [0.0, 0.5, 1.0, 1.0, 1.0]),
        ({"from": 1}, {}, [1.0, 0.0, 0.5, 1.0, 1.0]),
        ({}, {"start_step": 2}, [0.0, 0.0, 0.0, 0.5, 1.0]),
        ({"from": 1}, {"start_step": 2}, [1.0, 0.0, 0.0, 0.5, 1.0]),
    ],
)
def test_a_ramp_begins_with_its_rule_or_where_it_says(
    steps: dict[str, int], start: dict[str, int], wanted: list[float]
) -> None:
    ramp = {"from": 0.0, "to": 1.0, "steps": 2, **start}
    assert factors({"action": "scale", "factor": ramp, "at": "step", "steps": steps}, 5) == wanted


@pytest.mark.parametrize(
    ("action", "bound"),
    [({"action": "clamp", "at": "step"}, "max"), ({"action": "clip-norm", "per": "parameter", "norm_type": "inf"}, "max_norm")],
)  # fmt: skip
def test_bounds_and_norms_follow_ramps(action: dict[str, Any], bound: str) -> None:
    ramp = {"from": 1.0, "to": 0.25, "steps": 3}
    assert factors({**action, bound: ramp}, 4) == pytest.approx([1.0, 0.75, 0.5, 0.25], rel=1e-5)


def test_two_optimizers_have_ramps_of_their_own() -> None:
    model = linears(2, 2, 2)
    first = sgd(model[0], 0.0)
    second = sgd(model[1], 0.0)
    ramp = {"from": 1.0, "to": 0.0, "steps": 2}
    rule = {"id": "it", "action": "scale", "params": "*", "factor": ramp, "at": "step"}
    norms = []
    with attach(model, rule, optimizer=[first, second]):
        for update in range(3):
            model(torch.ones(1, 2)).sum().backward()
            first.step()
            if update == 2:
                second.step()
            norms.append([param.grad.any().item() for param in model.parameters()])  # type: ignore[union-attr]
            model.zero_grad()
    # The second optimizer is at its first update when the first is at its third.
    assert norms == [[True] * 4, [True] * 4, [False, False, True, True]]


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


class TwoHeads(nn.Module):
    """Features with a head for labels, and one for domains behind a reversal of gradients, if it has a factor."""

    def __init__(self, factor: Callable[[], float] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Linear(4, 6)
        self.label_head = nn.Linear(6, 2)
        self.domain_head = nn.Linear(6, 2)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.features(x).tanh()
        domain = hidden
        if self.factor is not None:
            domain = Reversal.apply(hidden, self.factor())
        outs: torch.Tensor = self.label_head(hidden).square() + self.domain_head(domain).exp()
        return outs


def test_the_reversal_of_the_guide_trains_as_the_layer_of_dann() -> None:
    (example,) = [
        block for block in guide.blocks(guide.text("points"), "yaml") if "reversal" in block
    ]
    progress = [0.0]
    weights = []
    rules: AbstractContextManager[object]
    for model in (TwoHeads(lambda: -SHAPES["sigmoid"](progress[0])), TwoHeads()):
        optimizer = sgd(model)
        rules = contextlib.nullcontext()
        if model.factor is None:
            rules = gradsurgeon.apply(model, yaml.safe_load(example.replace("10000", "4")))
        with rules:
            for step in range(4):
                progress[0] = step / 4
                take_step(optimizer, model(data(step, 5, 4)).mean())
        weights.append(weights_of(model))
    assert equal(*weights)


def test_the_plan_says_where_it_goes() -> None:
    ramp = {"from": 0, "to": -1, "steps": 10_000, "shape": "sigmoid", "start_step": 5}
    rules = rule_file({"id": "it", "action": "scale", "params": "*", "factor": ramp})
    shown = str(gradsurgeon.plan(nn.Linear(2, 2), rules))
    assert "it: `factor` goes from 0 to -1 in steps 5 to 10,005 (sigmoid)" in shown
