"""Rules at every point, in every set-up of one process, beside hooks written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from small import attach, net
from torch import Tensor, nn

import gradsurgeon

LIMIT = 0.02
STEPS = 3
AT = {"params": "0.*"}
OUT = {"modules": "0", "tensor": "output.grad"}
RULES: dict[str, list[Json]] = {
    "backward": [{"id": "r", "action": "clamp", **AT, "at": "backward", "max": LIMIT}],
    "accumulated": [{"id": "r", "action": "norm-log", **AT}],
    "step": [{"id": "r", "action": "clamp", **AT, "at": "step", "max": LIMIT}],
    "modules": [{"id": "r", "action": "clamp", **OUT, "max": LIMIT}],
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


def train(
    model: nn.Sequential, setup: Setup, *, before_update: Callable[[], None] = lambda: None
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if setup.scaled else None
    optimizer = None
    if not setup.by_hand:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=setup.fused)

    def backward(step: int) -> float:
        loss = torch.zeros(())
        for part in data(step, 8, 4).chunk(setup.parts):
            loss = model(part).square().mean() / setup.parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        before_update()
        return float(loss.detach())

    for step in range(STEPS):
        model.zero_grad()
        if optimizer is None:
            backward(step)
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(0.5 * grad_of(param))
        elif setup.closure:
            optimizer.step(partial(backward, step))
        else:
            backward(step)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def by_hand(point: str, setup: Setup) -> tuple[list[Tensor], list[float]]:
    """Return the end without rules, in true units throughout."""
    model = net()
    layer: Any = model[0]
    norms: list[float] = []

    def before_update() -> None:
        if point == "step":
            for param in layer.parameters():
                grad_of(param).clamp_(max=LIMIT)
        norms.append(float(torch.linalg.vector_norm(grad_of(layer.weight))))

    if point == "backward":
        for param in layer.parameters():
            param.register_hook(lambda grad: grad.clamp(max=LIMIT))
    elif point == "modules":

        def hook(_module: nn.Module, _args: Any, out: Tensor) -> None:
            out.register_hook(lambda grad: grad.clamp(max=LIMIT))

        layer.register_forward_hook(hook)
    train(model, Setup(parts=setup.parts), before_update=before_update)
    return [param.detach() for param in model.parameters()], norms


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
    with attach(model, *RULES[point]) as session:
        if point == "backward" and setup.parts > 1:
            with pytest.warns(
                gradsurgeon.GradSurgeonWarning, match="use `at: step` to bound the sum"
            ):
                train(model, setup)
        else:
            train(model, setup)
    for one, two in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(one.detach(), two, rtol=1e-5, atol=1e-7)
    if point == "accumulated":
        found = session.history("0.weight")
        assert [step for step, _ in found] == list(range(STEPS))
        assert [value for _, value in found] == pytest.approx(norms, rel=1e-5)
    else:
        gaps = [float((a - b).abs().max()) for a, b in zip(wanted, bare, strict=True)]
        assert max(gaps) > 1e-3
