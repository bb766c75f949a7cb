"""Rules that edit weights once an update is over, against loops written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from small import attach, equal, sgd, take_step, tanh_net, weights_of
from torch import Tensor, nn

import gradsurgeon

SCALED = {"action": "scale", "params": "0.*", "tensor": "update", "factor": 0.1}
CLAMPED = {"action": "clamp", "params": "*", "tensor": "value", "min": -0.05, "max": 0.05}
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def _net() -> Any:
    torch.manual_seed(0)
    return tanh_net(4, 8, 2)


def _loss(net: nn.Module, number: int) -> Tensor:
    loss: Tensor = net(data(number, 3, 4)).square().sum()
    return loss


def _held(
    net: nn.Module,
    optimizers: Optimizers,
    rule: Json,
    edit: Callable[[Any, list[Tensor]], None],
    *more: Json,
    bad: int | None = None,
    exact: bool = True,
    **options: Any,
) -> None:
    """Compare a training under rules with one by hand.

    Args:
        net: what is trained.
        optimizers: makes that of each.
        rule: edits weights.
        edit: edits the model by hand, given its weights before the update.
        more: rules beside it.
        bad: the step whose loss is NaN, and that a rule skips.
        exact: to the last bit.
        options: are those of `apply`.
    """
    by_hand = copy.deepcopy(net)
    optimizer = optimizers(net)
    other = optimizers(by_hand)
    with attach(net, rule, *more, **options):
        for number in range(4):
            take_step(optimizer, _loss(net, number) * (torch.nan if number == bad else 1.0))
            if number != bad:
                before = weights_of(by_hand)
                take_step(other, _loss(by_hand, number))
                with torch.no_grad():
                    edit(by_hand, before)
            if exact:
                assert equal(net.parameters(), by_hand.parameters())
            torch.testing.assert_close(weights_of(net), weights_of(by_hand))


def _clamp(model: Any, _: list[Tensor]) -> None:
    for param in model.parameters():
        param.clamp_(-0.05, 0.05)


def _scale(model: Any, before: list[Tensor]) -> None:
    for param, old in zip(model[0].parameters(), before[:2], strict=True):
        param.copy_(old + (param - old) * 0.1)


SKIP = {"action": "nan-trap", "params": "*", "then": "skip-step"}


@pytest.mark.parametrize(
    ("rules", "edit", "options"),
    [
        ([SCALED], _scale, {}),
        ([CLAMPED], _clamp, {}),
        ([SCALED, SKIP], _scale, {"bad": 1}),
    ],
    ids=["scaled", "clamped", "skipped"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    ],
)
def test_weights_equal_those_of_a_loop_written_by_hand(
    rules: list[Json], edit: Any, options: Json, make: Optimizers
) -> None:
    _held(_net(), make, rules[0], edit, *rules[1:], **options)


def test_an_update_is_bounded_by_the_norm_of_its_new_weights() -> None:
    def bound(model: Any, before: list[Tensor]) -> None:
        for layer, old in zip((model[0], model[2]), before[::2], strict=True):
            change = layer.weight - old
            most = 0.1 * layer.weight.norm(dim=1, keepdim=True).clamp(min=1e-3)
            size = change.norm(dim=1, keepdim=True)
            layer.weight.copy_(old + change * (most / size).clamp(max=1.0))

    rule = {
        "action": "clip-norm", "params": "*.weight", "tensor": "update", "per": "unit", "max_norm": 0.1,
        "relative_to": "weight",
    }  # fmt: skip
    _held(_net(), partial(sgd, lr=1.0), rule, bound, exact=False)


def test_records_below_see_the_edited_weight_and_ramps_follow_the_step() -> None:
    net = _net()
    optimizer = sgd(net, 0.5)
    edit = {**CLAMPED, "min": -1.0, "max": {"from": 0.4, "to": 0.1, "steps": 3}}
    record = {"action": "norm-log", "params": "*", "tensor": "value", "stats": ["max"]}
    with attach(net, edit, record) as session:
        for number in range(5):
            take_step(optimizer, _loss(net, number))
        largest = [value for _, value in session.history("0.weight", "max")]
        assert session.status()["r0"].fired == 20
    assert largest == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1], abs=1e-6)


def test_a_frozen_weight_and_one_without_a_gradient_stay() -> None:
    net = nn.ModuleDict({"cold": nn.Linear(4, 2), "idle": nn.Linear(4, 2), "warm": nn.Linear(4, 2)})
    optimizer = sgd(net)
    kept = weights_of(net)
    freeze = {"action": "freeze", "params": "cold.*"}
    with attach(net, freeze, {**SCALED, "params": "*", "factor": 0.0}):
        x = data(0, 3, 4)
        take_step(optimizer, (net["cold"](x) + net["warm"](x)).square().mean())
    assert equal(kept, net.parameters())


def test_updates_by_hand_are_refused() -> None:
    net = _net()
    with attach(net, SCALED, optimizer=[]) as session:
        _loss(net, 0).backward()
        with pytest.raises(gradsurgeon.GradSurgeonError, match="weights are updated by hand"):
            session.tick()
