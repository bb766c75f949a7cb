"""What is said right before the first update: an optimizer that was trained before, and a scale that its optimizer cancels."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from ranks import Json
from small import messages, sgd, take_step, tanh_net
from torch import Tensor, nn

import gradsurgeon

FREEZE = "{id: hold, action: freeze, params: '0.*', steps: {to: 5}}"
NORMS = "{id: norms, action: norm-log, params: '*'}"
SPIKES = "{id: spikes, action: spike-trap, params: '*', above: {sigmas: 2.5}}"
HAS_MADE = "AdamW has made 3 updates already, and steps count from 0 here"


def model_and_data() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return tanh_net(4, 3, 1), torch.randn(16, 4)


def train(model: nn.Module, x: Tensor, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        take_step(optimizer, (model(x) - x.sum(1, keepdim=True)).square().mean())


def told(
    rules: str, optimizer: Any, model: nn.Module, x: Tensor, **options: Any
) -> tuple[list[str], list[str]]:
    """Return the notices of a session, and the texts of the warnings."""
    text = f"version: 1\nrules:\n  - {rules}\n"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gradsurgeon.apply(model, text, **options) as session:
            train(model, x, optimizer, 6)
    notices = messages(session, "notice")
    return notices, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("rules", "is_warned"), [(FREEZE, True), (SPIKES, True), (NORMS, False)])
def test_an_optimizer_with_updates_is_told_once(rules: str, is_warned: bool) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, x, optimizer)
    resumed = torch.optim.AdamW(model.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    del optimizer
    notices, warned = told(rules, resumed, model, x)
    (notice,) = notices
    assert notice.startswith(HAS_MADE)
    assert ("so schedules and learned bounds start anew" in notice) == is_warned
    assert "pass start_step=3 to apply, or its state to session.load_state_dict" in notice
    assert len(warned) == is_warned


def test_a_training_that_begins_or_goes_on_is_not_told() -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters())
    assert told(FREEZE, optimizer, model, x) == ([], [])
    notices, _ = told(FREEZE, optimizer, model, x, start_step=6)
    assert not any("has made" in notice for notice in notices)
    # Plain SGD has no state.
    model, x = model_and_data()
    plain = sgd(model)
    train(model, x, plain)
    assert told(FREEZE, plain, model, x) == ([], [])


@pytest.mark.parametrize("is_fresh", [True, False])
def test_momentum_tells_of_updates_that_it_does_not_count(*, is_fresh: bool) -> None:
    model, x = model_and_data()
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if is_fresh:
        # As `torch.distributed.checkpoint` makes the state of a fresh optimizer.
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        momentum.step()
    else:
        train(model, x, momentum)
    notices, _ = told(FREEZE, momentum, model, x)
    if is_fresh:
        assert notices == []
        return
    (notice,) = notices
    assert notice.startswith("SGD has made N updates already, and steps count from 0 here")
    assert "pass start_step=N to apply" in notice


OPTIMIZERS = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"weight_decay": 10.0}),
    ("AdamW", {}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adamax", {}),
    ("Adagrad", {}),
    ("Adagrad", {"weight_decay": 10.0}),
    ("Adadelta", {}),
    ("Adafactor", {}),
    ("RMSprop", {}),
    ("RAdam", {}),
    ("ASGD", {}),
    ("SGD", {"lr": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("at", ["backward", "step"])
def test_a_scale_is_told_exactly_where_it_changes_nothing(
    name: str, options: Json, at: str
) -> None:
    def trained(factor: float) -> tuple[Tensor, list[str]]:
        model, x = model_and_data()
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        rule = f"{{id: slow, action: scale, params: '*', factor: {factor}, at: {at}}}"
        notices, _ = told(rule, optimizer, model, x)
        return nn.utils.parameters_to_vector(model.parameters()).detach() - before, notices

    plain, _ = trained(1.0)
    scaled, notices = trained(0.25)
    changes = float((scaled - plain).norm() / plain.norm()) > 1e-3
    assert any("changes next to nothing" in notice for notice in notices) == (not changes)


@pytest.mark.parametrize(
    "rule",
    [
        "factor: -1.0",
        "factor: 0.5, steps: {to: 3}",
        "factor: 0.5, steps: {every: 2}",
    ],
)
def test_a_scale_that_acts_under_adam_is_not_told(rule: str) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.Adam(model.parameters())
    text = f"{{id: slow, action: scale, params: '*', {rule}}}"
    assert told(text, optimizer, model, x) == ([], [])


def test_each_optimizer_is_asked_about_its_own_parameters() -> None:
    model = tanh_net(4, 3, 1)
    x = torch.randn(16, 4)

    class Both:
        def __init__(self) -> None:
            self.parts = [
                sgd(model[0]),
                torch.optim.Adam(model[2].parameters()),
            ]

        def zero_grad(self) -> None:
            model.zero_grad()

        def step(self) -> None:
            for part in self.parts:
                part.step()

    rule = "{id: slow, action: scale, params: '0.*', factor: 0.5}"
    assert told(rule, Both(), model, x) == ([], [])
    (notice,) = told(rule.replace("0.*", "2.*"), Both(), model, x)[0]
    assert notice.startswith("Adam divides each gradient")
