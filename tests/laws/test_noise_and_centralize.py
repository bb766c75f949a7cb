"""`noise` and `centralize`, beside the formulas of their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import edited, equal, rule_file, sgd
from torch import nn

import gradsurgeon


def noise(**options: Any) -> dict[str, Any]:
    return {"action": "noise", "std": 2.0, **options}


def test_the_deviation_sinks_as_in_the_paper() -> None:
    found = edited(noise(decay=0.55), (200, 500), 0.0, updates=4)
    for step, grad in enumerate(found):
        wanted = 2.0 / (1 + step) ** (0.55 / 2)
        assert grad.std().item() == pytest.approx(wanted, rel=0.02)
        assert abs(grad.mean().item()) < 0.03
    # Each update draws anew.
    assert abs(torch.corrcoef(torch.stack([found[0].flatten(), found[1].flatten()]))[0, 1]) < 0.02


def test_the_noise_depends_on_seed_step_and_name_alone() -> None:
    first = edited(noise(), (5, 7), 0.0, updates=3)
    torch.manual_seed(99)
    again = edited(noise(), (5, 7), 0.0, updates=3)
    assert equal(first, again)
    other = edited(noise(seed=1), (5, 7), 0.0, updates=1)
    assert not torch.equal(first[0], other[0])


def test_the_random_state_of_the_script_stays() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    edited(noise(), (5, 7), 0.0)
    torch.manual_seed(0)
    edited(noise(), (5, 7), 0.0)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), wanted)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(gradsurgeon.BindError, match="would make them dense"):
        gradsurgeon.plan(table, rule_file({"id": "it", "params": "*", **noise()}))


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_centralize_takes_the_mean_of_each_output_off(at: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 4)).to(dtype)
    x = torch.randn(5, 2, 2, 2).to(dtype)
    model(x).square().sum().backward()
    wanted = []
    for param in model.parameters():
        assert param.grad is not None
        grad = param.grad.float()
        if grad.dim() > 1:
            grad = grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True)
        wanted.append(grad.to(dtype))
    optimizer = sgd(model, 0.0)
    optimizer.zero_grad()
    rules = rule_file({"id": "it", "action": "centralize", "params": "*", "at": at})
    with gradsurgeon.apply(model, rules, optimizer=optimizer):
        model(x).square().sum().backward()
        optimizer.step()
    for param, grad in zip(model.parameters(), wanted, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, grad)
