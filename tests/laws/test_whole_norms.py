"""`norm-log` with `per: rule`: one number over all gradients, as `clip_grad_norm_` returns it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from models import data
from ranks import Json
from small import linears, rule_file, sgd, take_step
from torch import nn

import gradsurgeon
from gradsurgeon.report.json_form import to_dict
from gradsurgeon.report.sources import summary
from gradsurgeon.report.web_page import page_data

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
    rules = rule_file(WHOLE, {**WHOLE, "id": "clipped", "at": "step"})
    with gradsurgeon.apply(model, rules) as session:
        norms = train(model, sgd(model))
        assert min(norms) > 0.01
        assert recorded(session) == pytest.approx(norms, rel=1e-6)
        assert recorded(session, "clipped") == pytest.approx([0.01] * 4, rel=1e-3)
        names = {name for part in session.recorded().series for name in part.key.names}
    assert names == {"whole", "clipped", "loss", "SGD/0"}


def test_every_statistic_is_that_of_all_elements() -> None:
    model = linears(4, 4, 2)
    optimizer = sgd(model)
    stats = ["l1", "linf", "min", "max", "zeros", "nonfinite", "numel"]
    with gradsurgeon.apply(model, rule_file({**WHOLE, "stats": stats})) as session:
        features = data(0, 3, 4)
        features[:, 0] = 0.0  # so some gradients are 0
        model(features).square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        optimizer.step()
        wanted = {
            "l1": flat.abs().sum(),
            "linf": flat.abs().max(),
            "min": flat.min(),
            "max": flat.max(),
            "zeros": (flat == 0).sum(),
            "nonfinite": torch.zeros(()),
            "numel": torch.tensor(len(flat)),
        }
        assert wanted["zeros"] >= 4
        for stat, number in wanted.items():
            assert recorded(session, stat=stat) == [pytest.approx(float(number), rel=1e-5)], stat


def test_what_has_no_gradient_is_left_out_and_nan_is_kept() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2)})
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rule_file(WHOLE)) as session:
        take_step(optimizer, model["used"](data(0, 3, 4)).square().mean())
        take_step(optimizer, model["used"](data(1, 3, 4) * math.nan).sum())
        healthy, broken = recorded(session)
    assert math.isfinite(healthy)
    assert math.isnan(broken)


def test_each_of_several_optimizers_has_its_own() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    optimizers = [sgd(model["a"]), sgd(model["b"])]
    with gradsurgeon.apply(model, rule_file(WHOLE), optimizer=optimizers) as session:
        norms = {}
        for name, optimizer in zip("ab", optimizers, strict=True):
            optimizer.zero_grad()
            model[name](data(0, 3, 4)).square().mean().backward()
            norms[name] = nn.utils.clip_grad_norm_(model[name].parameters(), math.inf)
            optimizer.step()
        for name, norm in norms.items():
            assert recorded(session, f"{name}.whole") == [pytest.approx(norm.item(), rel=1e-6)]


def test_reports_show_it_and_no_parameter_as_without_a_gradient(tmp_path: Path) -> None:
    model = linears(4, 4, 2)
    with gradsurgeon.apply(model, rule_file(WHOLE), record=tmp_path / "run"):
        norms = train(model, sgd(model))
    with gradsurgeon.open_run(tmp_path / "run") as run:
        report = summary(run)
        page = page_data(run)
        assert [value for _, value in run.history("whole")] == pytest.approx(norms, rel=1e-6)
    text = report.text(width=100)
    assert "1 whole norm, recorded by whole (at accumulated)\n" in text
    assert "never got a gradient" not in text
    (row,) = to_dict(report)["norms"]
    assert (row["name"], row["last"]) == ("whole", pytest.approx(norms[-1], rel=1e-6))
    (kind,) = page["kinds"]
    (line,) = kind["wholes"]
    assert (line["label"], line["steps"]) == ("whole", [0, 1, 2, 3])
    assert line["values"] == pytest.approx(norms, rel=1e-5)


def test_it_follows_the_schedule_and_stays_apart_from_the_norms_of_parameters() -> None:
    model = linears(4, 4, 2)
    each: Json = {"id": "each", "action": "norm-log", "params": "*"}
    with gradsurgeon.apply(model, rule_file({**WHOLE, "steps": {"every": 2}}, each)) as session:
        norms = train(model, sgd(model))
        assert [step for step, _ in session.history("whole")] == [0, 2]
        assert recorded(session) == pytest.approx(norms[::2], rel=1e-6)
        assert len(session.history("0.weight")) == 4
