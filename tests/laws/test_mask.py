"""`mask`: some rows train, the others get no gradient, or stay bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import rule_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import gradsurgeon

ROWS = 10
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, 0.1, weight_decay=0.1),
    "fused AdamW": lambda params: AdamW(params, 0.1, weight_decay=0.1, fused=True),
    "amsgrad": lambda params: AdamW(params, 0.1, weight_decay=0.1, amsgrad=True),
    "SGD": lambda params: SGD(params, 0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda params: RMSprop(params, 0.1, momentum=0.9, weight_decay=0.1),
}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 2))


def mask(**options: Any) -> dict[str, Any]:
    rule = {"id": "new", "action": "mask", "params": "0.weight", "rows": "7:", **options}
    return rule_file(rule)


def steps(model: Any, optimizer: Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.arange(ROWS)).square().mean().backward()
        optimizer.step()


def states(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    kept = optimizer.state[param].items()
    return {name: value.clone() for name, value in kept if value.shape == param.shape}


@pytest.mark.parametrize(
    ("at", "then"), [("step", "zero"), ("backward", "zero"), ("step", "freeze")]
)
def test_rows_that_train_train_as_without_the_mask(at: str, then: str) -> None:
    alone = net()
    steps(alone, SGD(alone.parameters(), 0.1), 1)
    model = net()
    before = model[0].weight.detach().clone()
    optimizer = SGD(model.parameters(), 0.1)
    with gradsurgeon.apply(model, mask(at=at, then=then), optimizer=optimizer) as session:
        steps(model, optimizer, 1)
    assert session.status()["new"].fired == 1
    assert torch.equal(model[0].weight[:7], before[:7])
    assert torch.equal(model[0].weight[7:], alone[0].weight[7:])
    assert torch.equal(model[1].weight, alone[1].weight)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_rows_stay_bit_for_bit_under_decay_and_momentum(kind: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    weight = model[0].weight
    steps(model, optimizer, 2)
    before = weight.detach().clone()
    kept = states(optimizer, weight)
    assert kept
    with gradsurgeon.apply(model, mask(then="freeze"), optimizer=optimizer):
        steps(model, optimizer, 3)
    assert torch.equal(weight[:7], before[:7])
    assert not torch.equal(weight[7:], before[7:])
    for name, value in states(optimizer, weight).items():
        assert torch.equal(value[:7], kept[name][:7]), name
        assert not torch.equal(value[7:], kept[name][7:]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_rows_have_no_state_if_it_is_made_under_the_mask(kind: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with gradsurgeon.apply(model, mask(then="freeze"), optimizer=optimizer):
        steps(model, optimizer, 2)
    for name, value in states(optimizer, model[0].weight).items():
        assert not value[:7].any(), name
        assert value[7:].any(), name


def test_a_zero_gradient_alone_does_not_hold_weights() -> None:
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    before = model[0].weight.detach().clone()
    with gradsurgeon.apply(model, mask(), optimizer=optimizer):
        steps(model, optimizer, 1)
    assert not torch.equal(model[0].weight[:7], before[:7])


def test_a_skipped_update_is_left_alone() -> None:
    model = net()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    rules = mask(then="freeze")
    rules["rules"].append(trap)
    with gradsurgeon.apply(model, rules, optimizer=optimizer):
        steps(model, optimizer, 1)
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        (model(torch.arange(ROWS)).square().mean() * torch.nan).backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_observed_masks_change_nothing() -> None:
    alone = net()
    steps(alone, OPTIMIZERS["AdamW"](alone.parameters()), 2)
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    rules = mask(then="freeze")
    with gradsurgeon.apply(model, rules, optimizer=optimizer, mode="observe") as session:
        steps(model, optimizer, 2)
    assert session.status()["new"].changed == 1.0
    assert torch.equal(model[0].weight, alone[0].weight)


def test_rows_of_a_sparse_gradient() -> None:
    table = nn.Embedding(ROWS, 4, sparse=True)
    optimizer = SGD(table.parameters(), 0.1)
    rules = mask(params="*")
    with gradsurgeon.apply(table, rules, optimizer=optimizer):
        table(torch.tensor([1, 8, 8, 9])).sum().backward()
        optimizer.step()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0] * 8 + [2.0, 1.0]


@pytest.mark.parametrize(
    ("rows", "trains"),
    [("7:", [7, 8, 9]), (":2", [0, 1]), ("-2:", [8, 9]), ("2:-6", [2, 3]), ("8:99", [8, 9])],
)
def test_slices_are_those_of_python(rows: str, trains: list[int]) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    with gradsurgeon.apply(model, mask(rows=rows), optimizer=optimizer):
        steps(model, optimizer, 1)
    grad = model[0].weight.grad
    assert grad is not None
    assert grad.any(1).nonzero().flatten().tolist() == trains


def test_shapes_without_such_rows_are_refused_when_rules_are_bound() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with pytest.raises(gradsurgeon.BindError) as refused:
        gradsurgeon.plan(model, mask(params="*"))
    (first, second) = refused.value.complaints
    assert 'rule new: 1.weight has 2 rows, and `rows: "7:"` are none of them' in first
    assert "1.bias" in second
    assert "leave it out by `exclude`" in first


def test_lbfgs_cannot_hold_rows() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(gradsurgeon.GradSurgeonError, match="LBFGS moves all parameters together"):
        gradsurgeon.apply(model, mask(then="freeze"), optimizer=optimizer)
