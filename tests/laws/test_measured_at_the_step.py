"""What acts, decides or records at the step goes by the gradient as it is then, however it got there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import singly
from ranks import Json
from small import attach, linears, rule_file, sgd
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError

NORMS: Json = {"id": "seen", "action": "norm-log", "params": "*"}
AT_STEP: Json = {"id": "log", "action": "norm-log", "params": "*", "at": "step"}
CLIP: Json = {"id": "clip", "action": "clip-norm", "params": "*", "max_norm": 1.0}
TRAP: Json = {"id": "trap", "action": "nan-trap", "params": "*"}


def by_data(param: Tensor, factor: float) -> None:
    """As the DQN tutorial clips."""
    param.grad.data.mul_(factor)  # type: ignore[union-attr]


def by_numpy(param: Tensor, factor: float) -> None:
    assert param.grad is not None
    array = param.grad.numpy()
    array[:] = array * factor


def by_setting_data(param: Tensor, factor: float) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data * factor


def by_replacing(param: Tensor, factor: float) -> None:
    """The new tensor is likely to get the id of the old one."""
    assert param.grad is not None
    flat = param.grad.flatten() * factor
    param.grad = None
    param.grad = flat.view_as(param)


def by_storage(param: Tensor, factor: float) -> None:
    assert param.grad is not None
    view = torch.empty(0).set_(param.grad.untyped_storage())
    view.mul_(factor)


WAYS = [by_data, by_numpy, by_setting_data, by_replacing, by_storage]


def write(model: nn.Module, way: Callable[[Tensor, float], None], factor: float) -> None:
    model(torch.ones(2, 4)).sum().backward()
    for param in model.parameters():
        way(param, factor)


@singly(way=WAYS, watched=[True, False], factor=[0.01, 10.0])
def test_clips_and_records_measure_what_is_there(
    way: Callable[[Tensor, float], None], watched: bool, factor: float
) -> None:
    for _ in range(3):  # ids are reused more often than not
        model = nn.Linear(4, 3)
        optimizer = sgd(model)
        both = [AT_STEP, CLIP]
        with gradsurgeon.apply(
            model, rule_file(*([NORMS, TRAP] if watched else []), *both, params="*")
        ) as session:
            write(model, way, factor)
            grad = model.weight.grad
            assert grad is not None
            true = grad.norm().item()
            optimizer.step()
            assert session.latest("weight", rule="log") == pytest.approx(true)
            assert model.weight.grad is not None
            assert model.weight.grad.norm().item() == pytest.approx(min(true, 1.0), rel=1e-5)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_trap_sees_what_is_written_past_torch(way: Callable[[Tensor, float], None]) -> None:
    for _ in range(3):
        model = nn.Linear(4, 3)
        optimizer = sgd(model)
        before = model.weight.detach().clone()
        with attach(model, TRAP, NORMS):
            write(model, way, float("nan"))
            with pytest.raises(NonFiniteGradientError, match="finite after backward"):
                optimizer.step()
        assert torch.equal(before, model.weight)


@pytest.mark.parametrize("kind", ["clamp", "clip-norm", "nan-trap"])
def test_a_paused_session_does_nothing_at_a_tick(kind: str) -> None:
    options: Json = {
        "clamp": {"at": "step", "min": -1e-4, "max": 1e-4},
        "clip-norm": {"max_norm": 1e-4},
        "nan-trap": {},
    }
    fault = float("nan") if kind == "nan-trap" else 5.0
    model = nn.Linear(2, 1)
    rule = {"id": "r", "action": kind, **options[kind]}
    with gradsurgeon.apply(model, rule_file(rule, params="*"), optimizer=[]) as session:
        session.pause()
        (model(torch.ones(1, 2)) * fault).sum().backward()
        assert model.weight.grad is not None
        before = model.weight.grad.clone()
        assert session.tick()
        assert torch.equal(before, model.weight.grad) or kind == "nan-trap"
        assert session.step == 1
        session.resume()
        if kind == "nan-trap":
            with pytest.raises(NonFiniteGradientError):
                session.tick()
        else:
            session.tick()
            assert model.weight.grad.abs().max() < 1e-3


def accumulation(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def accumulation_onto_zeros(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    for _ in range(2):
        model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def sharpness(model: nn.Module, optimizer: Any) -> None:
    """Two passes with a clearing in between (SAM)."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def sharpness_onto_zeros(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def dropped(model: nn.Module, optimizer: Any) -> None:
    """A batch whose loss is not trusted leads to no update."""
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    if torch.rand(()) < 0.5:
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (accumulation, True),
        (accumulation_onto_zeros, True),
        (sharpness, False),
        (sharpness_onto_zeros, False),
        (dropped, False),
    ],
)
def test_accumulation_is_told_from_passes_that_are_cleared(
    loop: Callable[[nn.Module, Any], None], told: bool
) -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    bound = {"id": "bound", "action": "clamp", "at": "backward", "min": -0.1, "max": 0.1}
    with (
        warnings.catch_warnings(record=True) as said,
        gradsurgeon.apply(model, rule_file(bound, params="*")),
    ):
        warnings.simplefilter("always")
        for _ in range(6):
            loop(model, optimizer)
    assert ["several passes feed one update" in str(one.message) for one in said] == [True] * told


def test_a_layer_that_is_exchanged_is_under_its_rules_in_its_first_step() -> None:
    model: Any = linears(4, 4, 1)
    zero = {"id": "zero", "action": "zero", "params": "0.*"}
    with attach(model, zero) as session:
        model[0] = nn.Linear(4, 4)
        model[0].bias = nn.Parameter(torch.zeros(4))
        optimizer = sgd(model)
        model(torch.randn(8, 4)).square().mean().backward()
        assert not any(param.grad.any() for param in model[0].parameters())
        optimizer.step()
        assert session.step == 1
    assert session.events == []
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_module_registration_hooks
