"""`perturb`: noise of its own, of the size that it says, and of nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranks import Json
from small import equal, rule_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 5), nn.Dropout(0.5), nn.Linear(5, 1)
    )


def rules(eps: float, tensor: str = "input", seed: int = 0, *, owns_params: bool = True) -> Json:
    return rule_file(
        {
            "id": "noise",
            "action": "perturb",
            "modules": "*",
            "where": {"owns_params": owns_params},
            "tensor": tensor,
            "eps": eps,
            "seed": seed,
        }
    )


PLACES = torch.tensor([[0, 1, 2], [3, 4, 5]])


def outputs(given: Json | None) -> list[Tensor]:
    """Return the output, a gradient, and the next random number of the script."""
    model: Any = net()
    torch.manual_seed(1)
    with nullcontext() if given is None else gradsurgeon.apply(model, given):
        output = model(PLACES)
        output.sum().backward()
    return [output.detach(), model[2].weight.grad, torch.rand(3)]


@pytest.mark.parametrize("tensor", ["input", "output.grad"])
def test_noise_has_its_size_and_leaves_the_random_state_alone(tensor: str) -> None:
    plain = outputs(None)
    same = outputs(rules(1e-3, tensor))
    assert equal(same, outputs(rules(1e-3, tensor)))
    assert not torch.equal(outputs(rules(1e-3, tensor, seed=5))[1], same[1])
    assert torch.equal(plain[2], same[2])
    moved = (same[1] - plain[1]).norm() / plain[1].norm()
    assert 1e-4 < moved < 1e-2
    assert torch.equal(same[0], plain[0]) == (tensor == "output.grad")


@pytest.mark.parametrize(("owns_params", "names"), [(True, ["0", "2", "4"]), (False, ["1", "3"])])
def test_only_modules_with_parameters_are_matched(owns_params: bool, names: list[str]) -> None:
    plan = gradsurgeon.plan(net(), rules(1e-6, owns_params=owns_params))
    assert [binding.name for binding in plan.of("noise")] == names
    assert any("noise of 1e-06" in text for text in plan.rule_warnings["noise"])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str
)
def test_it_is_normal_noise_of_every_element_and_keeps_zeros_and_dtypes(dtype: torch.dtype) -> None:
    edit: Any = gradsurgeon.load(rules(1e-2)).rules[0].compile()
    tensor = torch.full((20_000,), 0.25, dtype=dtype)
    # Whole numbers may be a mask or categories, and a mask of attention has infinities.
    kept = torch.tensor([0.0, 1.0, 3.0, -torch.inf, torch.inf, torch.nan], dtype=dtype)
    tensor[:6] = kept
    noisy = edit.apply(tensor)
    assert noisy.dtype is dtype
    torch.testing.assert_close(noisy[:6], kept, rtol=0, atol=0, equal_nan=True)
    # Noise of bfloat16 is rounded to its grid.
    change = noisy[6:].to(torch.complex128).real / 0.25 - 1
    assert change.std().item() == pytest.approx(1e-2, rel=0.1)
    assert abs(change.mean().item()) < 1e-3


def test_attention_under_a_float_mask_stays_finite() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with gradsurgeon.apply(nn.Sequential(attention), rules(1e-6)):
        found, _ = attention(x, x, x, attn_mask=mask)
    plain, _ = attention(x, x, x, attn_mask=mask)
    assert found.isfinite().all()
    assert not torch.equal(found, plain)
    torch.testing.assert_close(found, plain)


def test_a_checkpointed_block_is_recomputed_with_noise_and_trains() -> None:
    model: Any = net()
    with gradsurgeon.apply(model, rules(1e-6, "output.grad")):
        output: Any = checkpoint(model, PLACES, use_reentrant=False)
        output.sum().backward()
    assert model[2].weight.grad is not None
