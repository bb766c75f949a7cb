"""`noise` and `centralize`, beside the formulas of their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import attach, edited, equal, rule_file, sgd, take_step
from torch import Tensor, nn

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
    edited(noise(), (5, 7), 0.0)
    before = torch.get_rng_state()
    edited(noise(), (5, 7), 0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(gradsurgeon.BindError, match="would make them dense"):
        gradsurgeon.plan(table, rule_file({"id": "it", "params": "*", **noise()}))


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_centralize_takes_the_mean_of_each_output_off(at: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 4)).to(dtype)
    x = torch.randn(5, 2, 2, 2).to(dtype)
    optimizer = sgd(model, 0.0)
    take_step(optimizer, model(x).square().sum())
    wanted = []
    for param in model.parameters():
        grad = param.grad.float()
        if grad.dim() > 1:
            grad = grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True)
        wanted.append(grad.to(dtype))
    with attach(model, {"action": "centralize", "params": "*", "at": at}, optimizer=optimizer):
        take_step(optimizer, model(x).square().sum())
    torch.testing.assert_close([param.grad for param in model.parameters()], wanted)


def test_parameters_of_one_shape_get_the_noise_of_their_names() -> None:
    def noise_of(params: str) -> list[Tensor]:
        model: Any = nn.ParameterList([torch.zeros(64), torch.zeros(64)])
        rule = {"id": "n", "action": "noise", "params": params, "std": 1.0}
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        with gradsurgeon.apply(model, {"version": 1, "rules": [rule]}, optimizer=optimizer):
            take_step(optimizer, (model[0] + model[1]).sum() * 0)
        return [param.detach().clone() for param in model]

    first, second = noise_of("*")
    assert not torch.equal(first, second)
    assert torch.equal(noise_of("1")[1], second)
