"""The running statistic of `spike-trap`, against the formulas of ZClip written out."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gradsurgeon


def history(seed: int, steps: int = 400) -> list[float]:
    rng = random.Random(seed)
    return [rng.lognormvariate(0, 0.3) * (5 if rng.random() < 0.03 else 1) for _ in range(steps)]


def let_through(norms: Sequence[float], **above: Any) -> list[float]:
    """Return how much of each norm a rule lets through."""
    rule = gradsurgeon.SpikeTrap.model_validate({"id": "spikes", "params": "*", "above": above})
    bound = rule.compile().bound
    kept = torch.zeros(bound.rows, 1, dtype=torch.float64)
    passed = []
    for norm in norms:
        allowed, kept = bound.advance(kept, torch.tensor([norm], dtype=torch.float64))
        passed.append(allowed.item())
    return passed


def by_the_paper(norms: Sequence[float], sigmas: float, beta: float, warmup: int) -> list[float]:
    start = norms[:warmup]
    mean = sum(start) / warmup
    var = sum((norm - mean) ** 2 for norm in start) / warmup
    allowed = list(start)
    for norm in norms[warmup:]:
        z = (norm - mean) / (var**0.5 + 1e-6)
        allowed.append(mean + sigmas**2 * var**0.5 / z if z > sigmas else norm)
        mean = beta * mean + (1 - beta) * allowed[-1]
        var = beta * var + (1 - beta) * (allowed[-1] - mean) ** 2
    return allowed


@pytest.mark.parametrize(
    ("sigmas", "beta", "warmup"), [(2.5, 0.97, 25), (1.0, 0.9, 10), (4.0, 0.99, 50)]
)
def test_what_is_let_through_is_what_the_formulas_say(
    sigmas: float, beta: float, warmup: int
) -> None:
    norms = history(0)
    allowed = let_through(norms, sigmas=sigmas, beta=beta, warmup=warmup)
    assert allowed == pytest.approx(by_the_paper(norms, sigmas, beta, warmup), rel=1e-9)
    spikes = [place for place, (a, norm) in enumerate(zip(allowed, norms, strict=True)) if a < norm]
    assert spikes
    assert min(spikes) >= warmup


def test_norms_that_are_zero_or_not_finite_never_enter() -> None:
    norms = history(1)
    mixed: list[float] = []
    for place, norm in enumerate(norms):
        mixed += [(0.0, math.inf, math.nan)[place % 3], norm]
    allowed = let_through(mixed, sigmas=2.0)
    assert allowed[1::2] == let_through(norms, sigmas=2.0)
    assert list(map(repr, allowed[::2])) == list(map(repr, mixed[::2]))


def test_a_spike_does_not_raise_the_bar_as_its_norm_would() -> None:
    calm = [1.0 + 0.1 * (step % 2) for step in range(100)]
    (*_, first, second) = let_through([*calm, 1000.0, 1000.0], sigmas=2.5)
    assert 1.0 < first < 1.3
    assert first < second < 1.5
