"""The running statistic of ZClip in plain Python, against its formulas written out."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

import gradsurgeon
from gradsurgeon.suggestion.thresholds import let_through


def history(seed: int, steps: int = 400) -> list[float]:
    rng = random.Random(seed)
    return [rng.lognormvariate(0, 0.3) * (5 if rng.random() < 0.03 else 1) for _ in range(steps)]


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
    allowed = list(let_through(norms, sigmas, beta=beta, warmup=warmup))
    assert allowed == pytest.approx(by_the_paper(norms, sigmas, beta, warmup), rel=1e-12)
    spikes = [place for place, (a, norm) in enumerate(zip(allowed, norms, strict=True)) if a < norm]
    assert spikes
    assert min(spikes) >= warmup


def test_norms_that_are_zero_or_not_finite_never_enter() -> None:
    norms = history(1)
    mixed: list[float] = []
    for place, norm in enumerate(norms):
        mixed += [(0.0, math.inf, math.nan)[place % 3], norm]
    allowed = list(let_through(mixed, 2.0))
    assert allowed[1::2] == list(let_through(norms, 2.0))
    assert list(map(repr, allowed[::2])) == list(map(repr, mixed[::2]))


def test_a_spike_does_not_raise_the_bar_as_its_norm_would() -> None:
    calm = [1.0 + 0.1 * (step % 2) for step in range(100)]
    (*_, first, second) = let_through([*calm, 1000.0, 1000.0], 2.5)
    assert 1.0 < first < 1.3
    assert first < second < 1.5


def test_it_is_the_statistic_of_the_rule() -> None:
    norms = [*history(2), 0.0, math.nan, *history(3)]
    rule = {"id": "spikes", "params": "*", "above": {"sigmas": 2.0}}
    bound = gradsurgeon.SpikeTrap.model_validate(rule).compile().bound
    kept, passed = torch.zeros(bound.rows, 1, dtype=torch.float64), []
    for norm in norms:
        allowed, kept = bound.advance(kept, torch.tensor([norm], dtype=torch.float64))
        passed.append(allowed.item())
    assert passed == pytest.approx(list(let_through(norms, 2.0)), rel=1e-9, nan_ok=True)
