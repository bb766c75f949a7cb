"""`norm-log` with `per: rule`: one number over all gradients, as `clip_grad_norm_` returns it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from small import attach, hold_rows, linears, sgd, steps_of, take_step
from torch import nn

import gradsurgeon

WHOLE = {"id": "whole", "action": "norm-log", "params": "*", "per": "rule"}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    """Train with two micro-batches and a clip by hand; return what the clip returns."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            model(data(2 * step + part, 3, 4)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
        optimizer.step()
    return norms


def recorded(session: gradsurgeon.Session, name: str = "whole", stat: str = "l2") -> list[float]:
    return [value for _, value in session.history(name, stat)]


def test_it_is_what_clip_grad_norm_returns_before_and_after_the_clip() -> None:
    model = linears(4, 4, 2)
    each: Json = {"id": "each", "action": "norm-log", "params": "*", "steps": {"every": 2}}
    other = {**WHOLE, "id": "other", "steps": {"every": 2}}
    with attach(model, WHOLE, {**WHOLE, "id": "clipped", "at": "step"}, other, each) as session:
        norms = train(model, sgd(model))
        assert min(norms) > 0.01
        assert recorded(session) == pytest.approx(norms, rel=1e-6)
        assert recorded(session, "clipped") == pytest.approx([0.01] * 4, rel=1e-3)
        names = {name for part in session.recorded().series for name in part.key.names}
        # It follows the schedule, and stays apart from the norms of parameters.
        hold_rows(session.history("other"), [(0, norms[0]), (2, norms[2])], rel=1e-6)
        assert steps_of(session, "0.weight") == [0, 2]
    params = {name for name, _ in model.named_parameters()}
    assert names == {"whole", "clipped", "other", "loss", "SGD/0", *params}


def test_every_statistic_is_that_of_all_elements() -> None:
    model: Any = linears(4, 4, 2)
    optimizer = sgd(model)
    stats = ["l1", "linf", "min", "max", "zeros", "nonfinite", "numel"]
    features = data(0, 3, 4)
    features[:, 0] = 0.0  # so some gradients are 0
    with attach(model, {**WHOLE, "stats": stats}) as session:
        take_step(optimizer, model(features).square().mean())
        found = [session.latest("whole", stat) for stat in stats]
    flat = torch.cat([param.grad.flatten() for param in model.parameters()])
    zeros = float((flat == 0).sum())
    sizes = flat.abs()
    wanted: list[Any] = [sizes.sum(), sizes.max(), flat.min(), flat.max(), zeros, 0.0, len(flat)]
    assert zeros >= 4
    assert found == pytest.approx([float(number) for number in wanted], rel=1e-5)


def test_what_has_no_gradient_is_left_out_and_nan_is_kept() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2)})
    optimizer = sgd(model)
    with attach(model, WHOLE) as session:
        take_step(optimizer, model["used"](data(0, 3, 4)).square().mean())
        take_step(optimizer, model["used"](data(1, 3, 4) * math.nan).sum())
        healthy, broken = recorded(session)
    assert math.isfinite(healthy)
    assert math.isnan(broken)


def test_each_of_several_optimizers_has_its_own() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    optimizers = {name: sgd(layer) for name, layer in model.items()}
    with attach(model, WHOLE, optimizer=[*optimizers.values()]) as session:
        norms = {name: train(model[name], optimizers[name], 1) for name in "ab"}
        for name, wanted in norms.items():
            assert recorded(session, f"{name}.whole") == pytest.approx(wanted, rel=1e-6)


def test_it_has_no_numbers_before_the_first_update() -> None:
    model = linears(4, 4, 2)
    with attach(model, WHOLE) as session:
        assert session.history("whole") == []
        with pytest.raises(gradsurgeon.RecordError, match="l2 of whole has not been recorded yet"):
            session.latest("whole")
        with pytest.raises(gradsurgeon.RecordError, match="no rule records l1 of whole; recorded"):
            session.history("whole", "l1")
        with pytest.raises(gradsurgeon.RecordError, match=r"no rule records l2 of 0\.weight"):
            session.history("0.weight")
        train(model, sgd(model), 1)
        assert len(session.history("whole")) == 1
