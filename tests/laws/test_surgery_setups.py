"""Edits of rows, elements, groups, weights and updates mean in each set-up of one process what they mean in a plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import data
from small import weights_of
from surgery import ACTIONS, ALONE, UPDATES, make, momentum, rules_in, train, update
from torch import Tensor

import gradsurgeon


def batch(step: int) -> Tensor:
    return data(step, 8, 4)


def trained(rules: Path | None, **options: Any) -> list[Tensor]:
    train(model := make(), rules, batch, **options)
    return weights_of(model)


def gap(one: list[Tensor], other: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.fixture(params=ACTIONS)
def rules(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return rules_in(tmp_path, request.param, make())


def test_accumulation(rules: Path) -> None:
    wanted = trained(rules)
    assert gap(trained(rules, parts=2), wanted) < 1e-6
    assert gap(trained(None), wanted) > 1e-3


def test_loss_scaling(rules: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert gap(trained(rules, scaler=scaler), trained(rules)) < 1e-6


def test_an_observed_rule_counts_and_changes_nothing(rules: Path) -> None:
    session = train(model := make(), rules, batch, mode="observe")
    assert gap(weights_of(model), trained(None)) == 0.0
    assert session is not None
    status = session.status()["it"]
    assert status.fired >= UPDATES
    assert status.changed is not None
    assert status.changed > 0


@pytest.mark.slow
def test_a_compiled_model(rules: Path) -> None:
    model = make()
    train(model, rules, batch, called=torch.compile(model, backend="aot_eager"))
    assert gap(weights_of(model), trained(rules)) < 1e-6


def test_a_resumed_training(rules: Path) -> None:
    wanted = trained(rules)
    model = make()
    optimizer = momentum(model)
    states: list[dict[str, Any]] = [model.state_dict(), optimizer.state_dict()]
    for steps in (range(2), range(2, UPDATES)):
        model = make()
        optimizer = momentum(model)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
            if states[2:]:
                session.load_state_dict(states[2])
            for step in steps:
                update(model, optimizer, batch(step))
            states = [model.state_dict(), optimizer.state_dict(), session.state_dict()]
            states = copy.deepcopy(states)
    assert gap(weights_of(model), wanted) == 0.0


def test_every_set_up_of_the_table_has_a_test() -> None:
    behind = {
        "accumulation": test_accumulation,
        "GradScaler": test_loss_scaling,
        "observe": test_an_observed_rule_counts_and_changes_nothing,
        "`torch.compile`": test_a_compiled_model,
        "resumed": test_a_resumed_training,
    }
    assert tuple(behind) == ALONE
