"""What acts, decides or records at the step goes by the gradient as it is then, however it got there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pairs import singly
from ranks import Json
from small import attach, sgd
from torch import Tensor, nn

from gradsurgeon import NonFiniteGradientError

NORMS: Json = {"id": "seen", "action": "norm-log", "params": "*"}
AT_STEP: Json = {"id": "log", "action": "norm-log", "params": "*", "at": "step"}
CLIP: Json = {
    "id": "clip",
    "action": "clip-norm",
    "per": "parameter",
    "params": "*",
    "max_norm": 1.0,
}
TRAP: Json = {"id": "trap", "action": "nan-trap", "params": "*"}


def by_data(param: Any, factor: float) -> None:
    """As the DQN tutorial clips."""
    param.grad.data.mul_(factor)


def by_numpy(param: Any, factor: float) -> None:
    array = param.grad.numpy()
    array[:] = array * factor


def by_setting_data(param: Any, factor: float) -> None:
    param.grad.data = param.grad.data * factor


def by_replacing(param: Any, factor: float) -> None:
    """The new tensor is likely to get the id of the old one."""
    flat = param.grad.flatten() * factor
    param.grad = None
    param.grad = flat.view_as(param)


def by_storage(param: Any, factor: float) -> None:
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
        model: Any = nn.Linear(4, 3)
        optimizer = sgd(model)
        with attach(model, *([NORMS, TRAP] if watched else []), AT_STEP, CLIP) as session:
            write(model, way, factor)
            true = model.weight.grad.norm().item()
            optimizer.step()
            assert session.latest("weight", rule="log") == pytest.approx(true)
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


@pytest.mark.parametrize(
    "rule",
    [
        {"action": "clamp", "at": "step", "min": -1e-4, "max": 1e-4},
        {"action": "clip-norm", "per": "parameter", "max_norm": 1e-4},
        {"action": "nan-trap"},
    ],
    ids=lambda rule: rule["action"],
)
def test_a_paused_session_does_nothing_at_a_tick(rule: Json) -> None:
    is_trap = rule["action"] == "nan-trap"
    model: Any = nn.Linear(2, 1)
    with attach(model, {**rule, "params": "*"}, optimizer=[]) as session:
        session.pause()
        (model(torch.ones(1, 2)) * (torch.nan if is_trap else 5.0)).sum().backward()
        before = model.weight.grad.clone()
        assert session.tick()
        assert torch.equal(before, model.weight.grad) or is_trap
        assert session.step == 1
        session.resume()
        with pytest.raises(NonFiniteGradientError) if is_trap else nullcontext():
            session.tick()
        assert model.weight.grad.abs().max() < 1e-3 or is_trap


def iteration(optimizer: Any, events: str, *, to_none: bool, loss: Callable[[], Tensor]) -> None:
    """Do what letters say: clear, a backward pass, a step."""
    for event in events:
        if event == "c":
            optimizer.zero_grad(set_to_none=to_none)
        elif event == "b":
            loss().backward()
        else:
            optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    ("events", "told"),
    [
        (["cbbs"], True),
        # Two passes with a clearing in between (SAM).
        (["cbcbs"], False),
        # A batch whose loss is not trusted leads to no update.
        (["cbs", "cb"], False),
    ],
    ids=["accumulation", "sharpness", "dropped"],
)
def test_accumulation_is_told_from_passes_that_are_cleared(
    events: list[str], told: bool, to_none: bool
) -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    bound = {"action": "clamp", "params": "*", "at": "backward", "min": -0.1, "max": 0.1}

    def loss() -> Tensor:
        return model(torch.randn(4, 3)).square().mean()  # type: ignore[no-any-return]

    with warnings.catch_warnings(record=True) as said, attach(model, bound):
        warnings.simplefilter("always")
        for number in range(6):
            iteration(optimizer, events[number % len(events)], to_none=to_none, loss=loss)
    assert ["several passes feed one update" in str(one.message) for one in said] == [True] * told


def test_gradients_that_the_script_assigns_beside_a_pass_are_recorded_and_trapped() -> None:
    """As gradient surgery by hand does: the trunk gets combined gradients, and heads those of a pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    trunk = list(model[0].parameters())
    session, optimizer = attach(model, NORMS, {**TRAP, "then": "skip-step"}), sgd(model)
    for factor in (1.0, float("nan")):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        grads = torch.autograd.grad(loss, trunk, retain_graph=True)
        loss.backward(inputs=list(model[1].parameters()))
        for param, grad in zip(trunk, grads, strict=True):
            param.grad = grad * factor
        optimizer.step()
    assert [step for step, _ in session.history("0.weight")] == [0, 1]
    (event,) = [event for event in session.events if event.kind == "trap"]
    assert (event.step, event.name) == (1, "0.weight")
