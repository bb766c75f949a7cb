"""Parameters that are replaced or converted under the rules: hooks come back, and it is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import data
from torch import nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning

ZERO: dict[str, Any] = {
    "version": 1,
    "rules": [{"id": "zero", "action": "zero", "params": "*.weight"}],
}


def small() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def train_once(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(data(0, 5, 4)).square().mean().backward()
    optimizer.step()


def acts(model: Any) -> bool:
    return not any(layer.weight.grad.any() for layer in model)


def assigned(model: Any) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def replaced(model: Any) -> None:
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach().clone())


def swapped(model: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("change", [assigned, replaced, swapped])
def test_hooks_come_back_with_one_warning(change: Any) -> None:
    model = small()
    with gradsurgeon.apply(model, ZERO) as session:
        train_once(model)
        assert acts(model)
        change(model)
        text = r"0\.weight, 1\.weight: each (was replaced|got another content)"
        with pytest.warns(GradSurgeonWarning, match=text) as said:
            train_once(model)
        assert len(said) == 1
        assert acts(model)  # nothing was missed
        train_once(model)
        assert acts(model)
    rearmed = [(e.kind, e.name) for e in session.events]
    assert rearmed == [("hook-rearmed", "0.weight"), ("hook-rearmed", "1.weight")]


def converted(model: Any) -> None:
    model.to(torch.float64).to(torch.float32)


def loaded(model: Any) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def shared(model: Any) -> None:
    model.share_memory()


def pruned_elsewhere(model: Any) -> None:
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()), model.parameters()
    )


@pytest.mark.parametrize("change", [converted, loaded, shared, pruned_elsewhere])
def test_what_keeps_parameters_keeps_hooks_without_a_word(change: Any) -> None:
    model = small()
    with gradsurgeon.apply(model, ZERO) as session:
        train_once(model)
        change(model)
        train_once(model)
        assert acts(model)
    assert session.events == []


def test_gradients_assigned_by_hand_are_mentioned_once_for_each_rule_that_does_not_see_them() -> (
    None
):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = {"action": "norm-log", "params": "*"}
    more = [{"id": "late", "at": "step", **norms}, {"id": "early", **norms}]
    rules = {"version": 1, "rules": [*ZERO["rules"], *more]}
    with (
        gradsurgeon.apply(model, rules, optimizer=optimizer) as session,
        pytest.warns(GradSurgeonWarning, match="no backward pass gave") as said,
    ):
        for number in range(1, 3):
            for param in model.parameters():
                param.grad = torch.full_like(param, float(number))
            optimizer.step()
        found = dict(session.history("0.bias", rule="late"))
        assert found == pytest.approx({0: 3**0.5, 1: 12**0.5})
        assert model[0].weight.grad.eq(2.0).all()
    assert [str(one.message).split(": ")[0] for one in said] == ["rule zero", "rule early"]
    assert all("use `at: step` for what the optimizer gets" in str(one.message) for one in said)
    assert [(e.kind, e.rule) for e in session.events if e.kind != "never-fired"] == [
        ("notice", "zero"),
        ("notice", "early"),
    ]


def test_hooks_that_somebody_has_taken_off_come_back() -> None:
    model = small()
    with gradsurgeon.apply(model, ZERO) as session:
        train_once(model)
        model[0].weight._backward_hooks.clear()
        with pytest.warns(GradSurgeonWarning, match="0.weight has lost its hooks"):
            train_once(model)
        train_once(model)
        assert acts(model)
    assert [(e.kind, e.name) for e in session.events] == [("hook-rearmed", "0.weight")]
