"""Half precision is multiplied in float32, wherever a factor acts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradsurgeon


def edited(rule: dict[str, object], grad: Tensor) -> Tensor:
    """Return a gradient as a rule at `step` leaves it."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(grad))
    model.weight.grad = grad.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = {"version": 1, "rules": [{"id": "rule", "params": "*", "at": "step", **rule}]}
    with gradsurgeon.apply(model, rules):
        optimizer.step()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
# float16 can hold neither 1e5 nor 1e-9; 1.003 is 1 to bfloat16, and 1.0004 to both of them.
@pytest.mark.parametrize("factor", [1e5, 1e-9, 1.003, 1.0004, 0.30012345])
def test_scale_rounds_what_comes_out_and_not_the_factor(dtype: torch.dtype, factor: float) -> None:
    grad = torch.tensor([6e-5, 1.9921875, 0.7, 60000.0], dtype=dtype)
    expected = (grad.float() * factor).to(dtype)
    assert torch.equal(edited({"action": "scale", "factor": factor}, grad), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clip_norm_rounds_what_comes_out_and_not_the_factor(dtype: torch.dtype) -> None:
    grad = torch.linspace(0.5, 7.0, 64, dtype=dtype)
    factor = 0.05 / grad.float().norm()
    expected = (grad.float() * factor).to(dtype)
    assert torch.equal(edited({"action": "clip-norm", "max_norm": 0.05}, grad), expected)


def test_a_float32_gradient_counts_as_changed_by_its_own_dtype() -> None:
    # In float64 the bound is smaller than the element; rounded to float32 it is the element.
    model = nn.Module()
    model.narrow = nn.Parameter(torch.zeros(2))
    model.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    bound = {"id": "b", "action": "clamp", "params": "*", "at": "step", "max": 0.1}
    with gradsurgeon.apply(model, {"version": 1, "rules": [bound]}) as session:
        (model.narrow.sum() * 0.1 + model.wide.sum()).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert session.status()["b"].changed == 0.5
