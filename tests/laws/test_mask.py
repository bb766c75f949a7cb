"""`mask`: some rows train, the others get no gradient, or stay bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Json
from small import attach, rule_file, take_step
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


def mask(**options: Any) -> Json:
    return {"id": "new", "action": "mask", "params": "0.weight", "rows": "7:", **options}


def steps(model: Any, optimizer: Optimizer, count: int) -> None:
    for _ in range(count):
        take_step(optimizer, model(torch.arange(ROWS)).square().mean())


def state_of(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Return copies of a parameter and of its state."""
    kept = {"weight": param.detach(), **optimizer.state[param]}
    return {name: value.clone() for name, value in kept.items() if value.shape == param.shape}


@pytest.mark.parametrize("known", [2, 0], ids=["state before", "state made under the mask"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_rows_stay_bit_for_bit_under_decay_and_momentum(kind: str, known: int) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    weight = model[0].weight
    steps(model, optimizer, known)
    before = state_of(optimizer, weight)
    assert len(before) > 1 or not known
    with attach(model, mask(then="freeze"), optimizer=optimizer):
        steps(model, optimizer, 3)
    after = state_of(optimizer, weight)
    assert len(after) > 1
    for name, value in after.items():
        old = before.get(name, torch.zeros(ROWS, 4))
        assert torch.equal(value[:7], old[:7]), name
        assert not torch.equal(value[7:], old[7:]), name


def test_rows_of_a_sparse_gradient() -> None:
    table: Any = nn.Embedding(ROWS, 4, sparse=True)
    optimizer = SGD(table.parameters(), 0.1)
    with attach(table, mask(params="*"), optimizer=optimizer):
        take_step(optimizer, table(torch.tensor([1, 8, 8, 9])).sum())
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0] * 8 + [2.0, 1.0]


@pytest.mark.parametrize(
    ("rows", "trains"),
    [("7:", [7, 8, 9]), (":2", [0, 1]), ("-2:", [8, 9]), ("2:-6", [2, 3]), ("8:99", [8, 9])],
)
def test_slices_are_those_of_python(rows: str, trains: list[int]) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    with attach(model, mask(rows=rows), optimizer=optimizer):
        steps(model, optimizer, 1)
    assert model[0].weight.grad.any(1).nonzero().flatten().tolist() == trains


def test_shapes_without_such_rows_are_refused_when_rules_are_bound() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with pytest.raises(gradsurgeon.BindError) as refused:
        gradsurgeon.plan(model, rule_file(mask(params="*")))
    (first, second) = refused.value.complaints
    assert 'rule new: 1.weight has 2 rows, and `rows: "7:"` are none of them' in first
    assert "1.bias" in second
    assert "leave it out by `exclude`" in first


def test_lbfgs_cannot_hold_rows() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(gradsurgeon.GradSurgeonError, match="LBFGS moves all parameters together"):
        attach(model, mask(then="freeze"), optimizer=optimizer)
