"""`perturb`: noise of its own, of the size that it says, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from commands import call
from ranks import Json
from small import rule_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import RuleFileError
from gradsurgeon.actions import Edit


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 5), nn.Dropout(0.5), nn.Linear(5, 1)
    )


def rules(eps: float, tensor: str = "input", seed: int = 0) -> Json:
    rule = {"id": "noise", "action": "perturb", "modules": "*", "where": {"owns_params": True}}
    return rule_file(rule | {"tensor": tensor, "eps": eps, "seed": seed})


PLACES = torch.tensor([[0, 1, 2], [3, 4, 5]])


def outputs(given: Json | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, a gradient, and the next random number of the script."""
    model = net()
    torch.manual_seed(1)
    session = None if given is None else gradsurgeon.apply(model, given)
    output = model(PLACES)
    output.sum().backward()
    if session is not None:
        session.remove()
    grad = model[2].weight.grad
    assert grad is not None
    return output.detach(), cast("Tensor", grad), torch.rand(3)


@pytest.mark.parametrize("tensor", ["input", "output.grad"])
def test_noise_has_its_size_and_leaves_the_random_state_alone(tensor: str) -> None:
    plain, same, other = outputs(None), outputs(rules(1e-3, tensor)), outputs(rules(1e-3, tensor))
    for one, again in zip(same, other, strict=True):
        assert torch.equal(one, again)
    seeded = outputs(rules(1e-3, tensor, seed=5))
    assert not torch.equal(seeded[1], same[1])
    assert torch.equal(plain[2], same[2])
    moved = (same[1] - plain[1]).norm() / plain[1].norm()
    assert 1e-4 < moved < 1e-2
    if tensor == "output.grad":
        assert torch.equal(same[0], plain[0])


def test_only_modules_with_parameters_are_matched() -> None:
    plan = gradsurgeon.plan(net(), rules(1e-6))
    assert [binding.name for binding in plan.of("noise")] == ["0", "2", "4"]
    without = rules(1e-6)
    without["rules"][0]["where"] = {"owns_params": False}
    names = [binding.name for binding in gradsurgeon.plan(net(), without).of("noise")]
    assert names == ["1", "3"]
    assert any("noise of 1e-06" in text for text in plan.rule_warnings["noise"])


def test_it_is_normal_noise_of_every_element_and_keeps_zeros_and_dtypes() -> None:
    (rule,) = gradsurgeon.load(rules(1e-2)).rules
    edit = rule.compile()
    assert isinstance(edit, Edit)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        tensor = torch.full((20_000,), 0.25, dtype=dtype)
        # Whole numbers may be a mask or categories, and a mask of attention has infinities.
        kept = torch.tensor([0.0, 1.0, 3.0, -torch.inf, torch.inf, torch.nan], dtype=dtype)
        tensor[: len(kept)] = kept
        noisy = edit.apply(tensor)
        assert noisy.dtype is dtype
        torch.testing.assert_close(noisy[: len(kept)], kept, rtol=0, atol=0, equal_nan=True)
        # Noise of bfloat16 is rounded to its grid.
        change = noisy[len(kept) :].to(torch.complex128).real / 0.25 - 1
        assert change.std().item() == pytest.approx(1e-2, rel=0.1)
        assert abs(change.mean().item()) < 1e-3


def test_attention_under_a_float_mask_stays_finite() -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with gradsurgeon.apply(nn.Sequential(attention), rules(1e-6)):
        found, _ = attention(x, x, x, attn_mask=mask)
    plain, _ = attention(x, x, x, attn_mask=mask)
    assert found.isfinite().all()
    assert not torch.equal(found, plain)
    torch.testing.assert_close(found, plain)


def test_a_checkpointed_block_is_recomputed_with_noise_and_trains() -> None:
    model = net()
    with gradsurgeon.apply(model, rules(1e-6, "output.grad")):
        output = checkpoint(model, PLACES, use_reentrant=False)
        assert isinstance(output, Tensor)
        output.sum().backward()
    assert model[2].weight.grad is not None


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"eps": 0.0}, "must be greater than 0"),
        ({"eps": 2}, "must be less than 1"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"where": {"ndim": 2}}, "`ndim` is no condition on modules"),
    ],
)
def test_bad_options_are_refused(option: Json, problem: str) -> None:
    given = rules(1e-6)
    given["rules"][0] |= option
    with pytest.raises(RuleFileError, match=problem):
        gradsurgeon.load(given)


def test_parameters_own_no_parameters() -> None:
    rule = {"id": "log", "action": "norm-log", "params": "*", "where": {"owns_params": True}}
    with pytest.raises(RuleFileError, match="`owns_params` is no condition on params"):
        gradsurgeon.load(rule_file(rule))


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_run_perturb_makes_runs_that_differ_by_rounding(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ("run", "--rules", "gradsurgeon:fingerprint@1")
    found = {}
    for name, options in {
        "plain": (),
        "noise-0": ("--perturb", "1e-6"),
        "again-0": ("--perturb", "1e-6", "--seed", "0"),
        "noise-1": ("--perturb", "1e-6", "--seed", "1"),
    }.items():
        done = call(*command, "--record", name, *options, "train.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("noise-of-inputs" in done.stderr) == bool(options)
        with gradsurgeon.open_run(tmp_path / name) as run:
            found[name] = run.latest("2", "projection_1", rule="fingerprint-outputs")
    assert found["noise-0"] == found["again-0"]
    assert len(set(found.values())) == 3
    assert found["noise-0"] == pytest.approx(found["plain"], abs=1e-3)
