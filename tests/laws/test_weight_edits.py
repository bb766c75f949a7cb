"""Rules that edit weights once an update is over, against loops written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import yaml
from models import data
from ranks import Json
from small import rule_file, sgd, take_step, weights_of
from torch import Tensor, nn

import gradsurgeon

SCALED = """\
version: 1
rules:
  - {id: slower, action: scale, params: "0.*", tensor: update, factor: 0.1}
"""
CLAMPED = """\
version: 1
rules:
  - {id: bound, action: clamp, params: "*", tensor: value, min: -0.05, max: 0.05}
"""
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def _net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    net(batch).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("form", ["scaled", "clamped", "observed", "skipped"])
@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    ],
)
def test_weights_equal_those_of_a_loop_written_by_hand(form: str, make: Optimizers) -> None:
    net = _net()
    by_hand = copy.deepcopy(net)
    rules = CLAMPED if form == "clamped" else SCALED
    if form == "skipped":
        rules += "  - {id: trap, action: nan-trap, params: '*', then: skip-step}\n"
    mode: Literal["act", "observe"] = "observe" if form == "observed" else "act"
    optimizer = make(net)
    other = make(by_hand)
    with gradsurgeon.apply(net, yaml.safe_load(rules), mode=mode):
        for number in range(4):
            batch = torch.randn(3, 4)
            is_bad = form == "skipped" and number == 1
            if is_bad:
                _step(net, optimizer, batch * float("nan"))
                continue
            _step(net, optimizer, batch)
            before = [param.detach().clone() for param in by_hand[0].parameters()]
            _step(by_hand, other, batch)
            with torch.no_grad():
                if form == "clamped":
                    for param in by_hand.parameters():
                        param.clamp_(-0.05, 0.05)
                elif form != "observed":
                    for param, old in zip(by_hand[0].parameters(), before, strict=True):
                        param.copy_(old + (param - old) * 0.1)
            for ours, theirs in zip(net.parameters(), by_hand.parameters(), strict=True):
                assert torch.equal(ours, theirs)


def _rule(**options: Any) -> Json:
    return rule_file({"id": "edit", "params": "*", **options})


def _sgd_step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    _step(net, optimizer, data(number, 3, 4))


def test_max_norm_bounds_each_unit_after_each_update() -> None:
    net, by_hand = _net(), _net()
    optimizer, other = sgd(net), sgd(by_hand)
    rules = _rule(action="clip-norm", params="*.weight", tensor="value", per="unit", max_norm=0.25)
    with gradsurgeon.apply(net, rules):
        for number in range(4):
            _sgd_step(net, optimizer, number)
            _sgd_step(by_hand, other, number)
            with torch.no_grad():
                for layer in (by_hand[0], by_hand[2]):
                    layer.weight.copy_(torch.renorm(layer.weight, 2, 0, 0.25))
            for ours, theirs in zip(net.parameters(), by_hand.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)
    assert net[0].weight.norm(dim=1).max().item() == pytest.approx(0.25, rel=1e-5)


def test_an_update_is_bounded_by_the_norm_of_its_new_weights() -> None:
    net, by_hand = _net(), _net()
    optimizer, other = sgd(net, 1.0), sgd(by_hand, 1.0)
    rules = _rule(
        action="clip-norm", params="*.weight", tensor="update", per="unit", max_norm=0.1,
        relative_to="weight",
    )  # fmt: skip
    with gradsurgeon.apply(net, rules):
        for number in range(4):
            _sgd_step(net, optimizer, number)
            before = [layer.weight.detach().clone() for layer in (by_hand[0], by_hand[2])]
            _sgd_step(by_hand, other, number)
            with torch.no_grad():
                for layer, old in zip((by_hand[0], by_hand[2]), before, strict=True):
                    change = layer.weight - old
                    most = 0.1 * layer.weight.norm(dim=1, keepdim=True).clamp(min=1e-3)
                    size = change.norm(dim=1, keepdim=True)
                    layer.weight.copy_(old + change * (most / size).clamp(max=1.0))
            for ours, theirs in zip(net.parameters(), by_hand.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)


def test_records_below_see_the_edited_weight_and_ramps_follow_the_step() -> None:
    net = _net()
    optimizer = sgd(net, 0.5)
    edit = {
        "action": "clamp", "params": "*", "tensor": "value", "min": -1.0,
        "max": {"from": 0.4, "to": 0.1, "steps": 3},
    }  # fmt: skip
    record = {"action": "norm-log", "params": "*", "tensor": "value", "stats": ["max"]}
    with gradsurgeon.apply(net, rule_file(edit, record)) as session:
        for number in range(5):
            _sgd_step(net, optimizer, number)
        largest = [value for _, value in session.history("0.weight", "max")]
        assert session.status()["r0"].fired == 20
    assert largest == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1], abs=1e-6)


def test_a_frozen_weight_and_one_without_a_gradient_stay() -> None:
    net = nn.ModuleDict({"cold": nn.Linear(4, 2), "idle": nn.Linear(4, 2), "warm": nn.Linear(4, 2)})
    optimizer = sgd(net)
    kept = {name: param.detach().clone() for name, param in net.named_parameters()}
    freeze = {"action": "freeze", "params": "cold.*"}
    half = {"action": "scale", "params": "*", "tensor": "update", "factor": 0.0}
    with gradsurgeon.apply(net, rule_file(freeze, half)):
        x = data(0, 3, 4)
        take_step(optimizer, (net["cold"](x) + net["warm"](x)).square().mean())
    for name, param in net.named_parameters():
        assert torch.equal(param, kept[name]), name


def test_updates_by_hand_are_refused() -> None:
    net = _net()
    rules = _rule(action="scale", tensor="update", factor=0.5)
    with gradsurgeon.apply(net, rules, optimizer=[]) as session:
        net(data(0, 3, 4)).square().mean().backward()
        with pytest.raises(gradsurgeon.GradSurgeonError, match="weights are updated by hand"):
            session.tick()


def test_a_fused_update_that_the_scaler_skips_is_not_edited() -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    rules = _rule(action="clamp", tensor="value", min=-0.05, max=0.05)
    kept = weights_of(net)
    with gradsurgeon.apply(net, rules):
        optimizer.zero_grad()
        scaler.scale(net(data(0, 3, 4) * torch.inf).nan_to_num(1.0).sum() * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, weights_of(net), kept))
        optimizer.zero_grad()
        scaler.scale(net(data(0, 3, 4)).square().sum()).backward()
        scaler.step(optimizer)
    assert max(float(weight.abs().max()) for weight in weights_of(net)) <= 0.05 + 1e-7


def test_the_plan_says_how_large_the_copy_is() -> None:
    plan = gradsurgeon.plan(_net(), _rule(action="scale", tensor="update", factor=0.5))
    assert "edit: keeps a copy of the matched weights during each update, 232 bytes in all" in str(
        plan
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "clip-norm", "tensor": "value", "max_norm": 1}, "`value` is clipped unit by unit"),
        (
            {"action": "clip-norm", "tensor": "value", "max_norm": 1, "per": "unit", "relative_to": "weight"},
            "`value` is the weight itself",
        ),
        ({"action": "clamp", "tensor": "update", "max": 1}, "clamp does not take `update` of a parameter"),
        ({"action": "scale", "tensor": "update", "factor": 1, "at": "step"}, "`at` is a moment before"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(options: Json, message: str) -> None:
    with pytest.raises(gradsurgeon.GradSurgeonError, match=message):
        gradsurgeon.apply(_net(), _rule(**options))
