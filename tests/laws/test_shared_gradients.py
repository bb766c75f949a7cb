"""A rule at `step` writes in place, and yet nothing that others hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurgeon

HALF: dict[str, Any] = {"id": "half", "action": "scale", "factor": 0.5, "at": "step", "params": "a"}


class Two(nn.Module):
    """Two parameters of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))


def steps_with(first: Tensor, second: Tensor, params: str) -> tuple[float, float]:
    """Return how far one step of plain SGD moves two parameters with these gradients."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rules = {"version": 1, "rules": [{**HALF, "params": params}]}
    with gradsurgeon.apply(model, rules, optimizer=optimizer):
        (model.a + model.b).sum().backward()
        model.a.grad, model.b.grad = first, second
        optimizer.step()
    return -model.a.item(), -model.b.item()


@pytest.mark.parametrize(
    ("params", "moved"), [("a", (2.0, 4.0)), ("b", (4.0, 2.0)), ("*", (2.0, 2.0))]
)
def test_one_gradient_of_two_parameters(params: str, moved: tuple[float, float]) -> None:
    both = torch.full((1,), 4.0)
    assert steps_with(both, both, params) == moved
    assert both.item() == 4.0


@pytest.mark.parametrize(
    ("params", "moved"), [("a", (2.0, 4.0)), ("b", (4.0, 2.0)), ("*", (2.0, 2.0))]
)
def test_two_gradients_in_one_memory(params: str, moved: tuple[float, float]) -> None:
    memory = torch.full((1,), 4.0)
    assert steps_with(memory[:], memory[:], params) == moved
    assert memory.item() == 4.0


def test_a_gradient_that_the_script_holds_a_view_of() -> None:
    buffer = torch.full((2,), 4.0)
    assert steps_with(buffer[:1], buffer[1:], "a") == (2.0, 4.0)
    assert buffer.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("rule", "written"),
    [
        ({"action": "clamp", "min": -9.0, "max": 9.0}, False),
        ({"action": "clamp", "min": -9.0, "max": 3.0}, True),
        ({"action": "clip-norm", "max_norm": 9.0}, False),
        ({"action": "clip-norm", "max_norm": 9.0, "per": "rule"}, False),
        ({"action": "clip-norm", "max_norm": 3.0}, True),
        ({"action": "scale", "factor": 1.0}, False),
        ({"action": "zero"}, True),
    ],
)
def test_what_would_stay_as_it_is_is_not_written(rule: dict[str, Any], *, written: bool) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = {"version": 1, "rules": [{"id": "rule", "params": "*", "at": "step", **rule}]}
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        (4.0 * (model.a + model.b)).sum().backward()
        versions = [param.grad._version for param in model.parameters() if param.grad is not None]
        optimizer.step()
        after = [param.grad._version for param in model.parameters() if param.grad is not None]
    assert (after != versions) is written
    status = session.status()["rule"]
    assert (status.fired, status.changed) == (2, float(written))
