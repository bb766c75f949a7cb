"""Rules at every point, in every set-up of one process, beside hooks written by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from small import attach, hold_rows, net, weights_of
from torch import Tensor

import gradsurgeon

LIMIT = 0.02
STEPS = 3
CLAMP = {"id": "r", "action": "clamp", "max": LIMIT}
RULES: dict[str, Json] = {
    "backward": {**CLAMP, "params": "0.*", "at": "backward"},
    "accumulated": {"id": "r", "action": "norm-log", "params": "0.*"},
    "step": {**CLAMP, "params": "0.*", "at": "step"},
    "modules": {**CLAMP, "modules": "0", "tensor": "output.grad"},
}


@dataclass(frozen=True)
class Setup:
    parts: int = 1
    scaled: bool = False
    fused: bool = False
    closure: bool = False
    by_hand: bool = False


SETUPS = {
    "one process": Setup(),
    "one process, fused optimizer": Setup(fused=True),
    "accumulation": Setup(parts=2),
    "GradScaler": Setup(scaled=True),
    "GradScaler, fused optimizer": Setup(scaled=True, fused=True),
    "GradScaler and accumulation": Setup(scaled=True, parts=2),
    "GradScaler and accumulation, fused": Setup(scaled=True, parts=2, fused=True),
    "closures (LBFGS)": Setup(closure=True),
    "updates written by hand": Setup(by_hand=True),
}


def train(model: Any, setup: Setup, *, before_update: Callable[[], None] = lambda: None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=setup.scaled)
    optimizer = None
    if not setup.by_hand:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=setup.fused)

    def backward(step: int) -> float:
        loss = torch.zeros(())
        for part in data(step, 8, 4).chunk(setup.parts):
            loss = model(part).square().mean() / setup.parts
            scaler.scale(loss).backward()
        before_update()
        return float(loss.detach())

    for step in range(STEPS):
        model.zero_grad()
        if setup.closure:
            optimizer.step(partial(backward, step))  # type: ignore[union-attr]
            continue
        backward(step)
        if optimizer is None:
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(0.5 * param.grad)
        else:
            scaler.step(optimizer)
            scaler.update()


def by_hand(point: str, setup: Setup) -> tuple[list[Tensor], list[float]]:
    """Return the end without rules, in true units throughout."""
    model: Any = net()
    norms: list[float] = []

    def bound(grad: Tensor) -> Tensor:
        return grad.clamp(max=LIMIT)

    def before_update() -> None:
        if point == "step":
            for param in model[0].parameters():
                param.grad.clamp_(max=LIMIT)
        norms.append(float(torch.linalg.vector_norm(model[0].weight.grad)))

    if point == "backward":
        for param in model[0].parameters():
            param.register_hook(bound)
    elif point == "modules":

        def hook(*call: Any) -> None:
            call[2].register_hook(bound)

        model[0].register_forward_hook(hook)
    train(model, Setup(parts=setup.parts), before_update=before_update)
    return weights_of(model), norms


@pytest.mark.cell(
    "GradScaler and accumulation",
    "backward",
    differs="bounds each backward pass, not the sum, with one warning; `scale` and `zero` mean the same as at `step`",
)
@pytest.mark.cell(
    "GradScaler and accumulation",
    "accumulated",
    differs="the record of a step comes from its last pass",
)
@pytest.mark.cell("one process", "backward", "accumulated", "step", "modules")
@pytest.mark.cell("one process, fused optimizer", "backward", "accumulated", "step", "modules")
@pytest.mark.cell("accumulation", "step", "modules")
@pytest.mark.cell("GradScaler", "backward", "accumulated", "step", "modules")
@pytest.mark.cell("GradScaler, fused optimizer", "backward", "accumulated", "step", "modules")
@pytest.mark.cell("GradScaler and accumulation", "step", "modules")
@pytest.mark.cell("closures (LBFGS)", "backward", "accumulated", "step", "modules")
@pytest.mark.cell("updates written by hand", "backward", "accumulated", "modules")
@pytest.mark.parametrize("point", RULES)
@pytest.mark.parametrize("name", SETUPS)
def test_rules_do_what_hooks_do(name: str, point: str) -> None:
    setup = SETUPS[name]
    wanted, norms = by_hand(point, setup)
    bare, _ = by_hand("nothing", setup)
    model = net()
    is_told = point == "backward" and setup.parts > 1
    text = "use `at: step` to bound the sum"
    warns = pytest.warns(gradsurgeon.GradSurgeonWarning, match=text) if is_told else nullcontext()
    with attach(model, RULES[point]) as session, warns:
        train(model, setup)
    torch.testing.assert_close(weights_of(model), wanted, rtol=1e-5, atol=1e-7)
    if point == "accumulated":
        hold_rows(session.history("0.weight"), [*enumerate(norms)], rel=1e-5)
    else:
        gaps = [float((a - b).abs().max()) for a, b in zip(wanted, bare, strict=True)]
        assert max(gaps) > 1e-3
