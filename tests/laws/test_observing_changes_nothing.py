"""P1: with observing rules only, training is bit-identical to training without gradsurgeon."""

from __future__ import annotations

import pytest
import torch
from models import CASES, Mlp, same, train
from torch import nn

import gradsurgeon

OBSERVING = """
version: 1
rules:
  - {id: norms, action: norm-log, params: "*"}
  - {id: contributions, action: norm-log, at: backward, params: "*", stats: [l1, std, zeros]}
  - {id: final, action: norm-log, at: step, params: "*", stats: [linf, nonfinite]}
  - {id: trap, action: nan-trap, params: "*"}
  - {id: spikes, action: spike-trap, params: "*", above: {sigmas: 4, warmup: 2}, then: warn}
"""


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_without(name: str) -> None:
    case = CASES[name]
    plain = train(case, case.make())
    model = case.make()
    with gradsurgeon.apply(model, OBSERVING) as session:
        observed = train(case, model)
    assert same(observed, plain)
    assert all(status.fired > 0 for status in session.status().values())


def test_fifty_steps_with_dropout_and_batchnorm() -> None:
    case = CASES["mlp"]
    plain = train(case, case.make(), steps=50)
    model = case.make()
    with gradsurgeon.apply(model, OBSERVING) as session:
        observed = train(case, model, steps=50)
    assert isinstance(model, Mlp)
    assert [torch.equal(a, b) for a, b in zip(observed, plain, strict=True)] == [True] * len(plain)
    # Anybody who observes must have seen all steps.
    assert [step for step, _ in session.history("fc1.weight", rule="norms")] == list(range(50))


@pytest.mark.parametrize("name", CASES)
def test_recorded_norms_are_the_true_ones(name: str) -> None:
    case = CASES[name]
    model = case.make()
    optimizer = case.optimizer(model)
    with gradsurgeon.apply(model, OBSERVING) as session:
        case.backward(model, 0)
        wanted = {
            key: torch.linalg.vector_norm(
                (param.grad.to_dense() if param.grad.is_sparse else param.grad).to(
                    torch.complex128 if param.is_complex() else torch.float64
                )
            ).item()
            for key, param in model.named_parameters()
            if param.grad is not None
        }
        optimizer.step()
    assert wanted
    for key, norm in wanted.items():
        assert session.latest(key, rule="norms") == pytest.approx(norm, rel=1e-5, abs=1e-30)


def test_every_statistic_of_a_known_gradient() -> None:
    model = nn.Linear(4, 1, bias=False)
    stats = ["l1", "l2", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"]
    rules = {
        "version": 1,
        "rules": [{"id": "n", "action": "norm-log", "params": "*", "stats": stats}],
    }
    with gradsurgeon.apply(model, rules) as session:
        model.weight.backward(torch.tensor([[3.0, -4.0, 0.0, 1.0]]))
        found = {stat: session.latest("weight", stat) for stat in stats}
    assert found == pytest.approx(
        {
            "l1": 8.0,
            "l2": 26.0**0.5,
            "linf": 4.0,
            "mean": 0.0,
            "std": 6.5**0.5,
            "min": -4.0,
            "max": 3.0,
            "zeros": 1.0,
            "nonfinite": 0.0,
        }
    )
