"""ZClip of one number on the host computes in numbers of Python, and learns what tensors learn, bit by bit."""

from __future__ import annotations

import math
import random

import pytest
import torch

from gradsurgeon.actions._bounds import zclip


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e150, 1e-310])
@pytest.mark.parametrize("sigmas", [1.0, 2.5, 1e9])
def test_one_number_is_judged_as_one_of_two(scale: float, sigmas: float) -> None:
    numbers = random.Random(0)
    bound = zclip(sigmas, beta=0.9, warmup=5)
    one = torch.zeros(3, 1, dtype=torch.float64)
    two = torch.zeros(3, 2, dtype=torch.float64)
    for _ in range(200):
        factor = numbers.choice([1.0, 1.0, 1.0, 1.0, 30.0, -3.0, 0.0, math.inf, math.nan])
        norm = torch.tensor([scale * numbers.gauss(3, 1) * factor], dtype=torch.float64)
        passed, one = bound.advance(one, norm)
        both, two = bound.advance(two, norm.expand(2))
        torch.testing.assert_close(passed, both[:1], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(one, two[:, :1], rtol=0, atol=0, equal_nan=True)
