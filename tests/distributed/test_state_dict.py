"""Saving and loading by `torch.distributed.checkpoint` takes a step that is none."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from ranks import Json
from small import rule_file, steps_of, tanh_net, weights_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradsurgeon

RULES: Json = rule_file(
    {
        "id": "bound",
        "action": "clamp",
        "params": "*",
        "at": "step",
        "min": -1e-3,
        "max": 1e-3,
        "steps": {"from": 4},
    },
    {"id": "log", "action": "norm-log", "params": "*", "at": "step"},
)


def fresh(start: int) -> tuple[nn.Sequential, torch.optim.AdamW, gradsurgeon.Session]:
    """Return a model, an optimizer without state, and rules that begin at a step."""
    torch.manual_seed(0)
    model = tanh_net(4, 8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, gradsurgeon.apply(model, RULES, start_step=start)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take some steps."""
    for step in steps:
        optimizer.zero_grad()
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        (model(batch) - 1).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    """Return copies of the weights."""
    return weights_of(model)


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one() -> None:
    model, optimizer, session = fresh(0)
    train(model, optimizer, range(3))
    kept = copy.deepcopy(get_state_dict(model, optimizer))
    train(model, optimizer, range(3, 6))
    whole = weights(model)
    session.remove()

    model, optimizer, session = fresh(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradsurgeon.GradSurgeonWarning)
        set_state_dict(model, optimizer, model_state_dict=kept[0], optim_state_dict=kept[1])
        assert session.step == 3
        train(model, optimizer, range(3, 6))
    assert session.events == []
    assert steps_of(session, "0.weight") == [3, 4, 5]
    session.remove()
    for one, other in zip(whole, weights(model), strict=True):
        assert torch.equal(one, other)


def test_reading_the_state_of_a_fresh_optimizer_is_no_step() -> None:
    model, optimizer, session = fresh(0)
    get_state_dict(model, optimizer)
    assert session.step == 0
    assert session.history("0.weight") == []
    train(model, optimizer, range(1))
    assert session.step == 1
    session.remove()


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_step_of_the_script_at_a_learning_rate_of_zero_counts(rate: float | Tensor) -> None:
    model, optimizer, session = fresh(0)
    optimizer.param_groups[0]["lr"] = rate
    train(model, optimizer, range(1))
    assert session.step == 1
    assert steps_of(session, "0.weight") == [0]
    session.remove()
