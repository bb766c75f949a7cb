"""Activation checkpointing: nothing is counted, edited or recorded twice, in either kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import NonFiniteGradientError

KINDS = [None, True, False]
IDS = ["none", "reentrant", "not reentrant"]


class Net(nn.Module):
    """Two checkpointed blocks between two layers that are not."""

    def __init__(self, reentrant: bool | None, *, whole: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.whole = whole
        self.first = nn.Linear(4, 4)
        self.a = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 2)

    def block(self, module: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return module(x)  # type: ignore[no-any-return]
        return checkpoint(module, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def inside(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.b(self.a(self.first(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.whole and self.reentrant is not None:
            return checkpoint(self.inside, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]
        if self.whole:
            return self.inside(x)
        out: Tensor = self.last(self.block(self.b, self.block(self.a, self.first(x))))
        return out


RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "bound",
            "action": "clamp",
            "params": "*",
            "at": "backward",
            "min": -0.1,
            "max": 0.1,
        },
        {"id": "half", "action": "scale", "modules": "a.0", "tensor": "output.grad", "factor": 0.5},
        {"id": "more", "action": "scale", "modules": "b.0", "tensor": "output", "factor": 1.5},
        {"id": "late", "action": "clip-norm", "params": "*", "max_norm": 0.2, "per": "rule"},
        {"id": "norms", "action": "norm-log", "params": "*"},
        {"id": "each", "action": "norm-log", "params": "*", "at": "backward"},
        {"id": "acts", "action": "norm-log", "modules": "a.0", "tensor": "output"},
        {"id": "trap", "action": "nan-trap", "params": "*"},
    ],
}


def run(reentrant: bool | None, *, whole: bool, fault: int = -1) -> tuple[Any, gradsurgeon.Session]:
    torch.manual_seed(6)
    model = Net(reentrant, whole=whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with gradsurgeon.apply(model, RULES) as session:
        for number in range(3):
            optimizer.zero_grad()
            x = data(number, 5, 4).requires_grad_(True)
            bad = float("nan") if number == fault else 1.0
            (model(x).square().mean() * 5 * bad).backward()
            optimizer.step()
    return model, session


@pytest.mark.cell(
    "activation checkpointing, not reentrant", "backward", "accumulated", "step", "modules"
)
@pytest.mark.cell(
    "activation checkpointing, reentrant", "backward", "accumulated", "step", "modules"
)
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole model"])
@pytest.mark.parametrize("reentrant", [True, False], ids=IDS[1:])
def test_the_same_as_without_checkpointing(reentrant: bool, whole: bool) -> None:
    plain, plain_session = run(None, whole=whole)
    model, session = run(reentrant, whole=whole)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert session.status() == plain_session.status()
    assert session.events == plain_session.events == []
    for rule in ("norms", "each"):
        for name, _ in model.named_parameters():
            wanted = plain_session.history(name, rule=rule)
            assert session.history(name, rule=rule) == wanted
            assert [step for step, _ in wanted] == [0, 1, 2]
    # The forward that checkpointing repeats inside backward is no second record.
    assert session.history("a.0") == plain_session.history("a.0")
    assert len(session.history("a.0")) == 3


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole model"])
@pytest.mark.parametrize("reentrant", KINDS, ids=IDS)
def test_the_trap_sees_one_pass(reentrant: bool | None, whole: bool) -> None:
    with pytest.raises(NonFiniteGradientError) as caught:
        run(reentrant, whole=whole, fault=1)
    first = str(caught.value).splitlines()[0]
    assert first == "step 1, rule trap: 8 of 8 gradients are not finite after backward"
    assert caught.value.name == "last.bias"
