"""The statistics of gradients: the same numbers whichever way they are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsurgeon.tensors import _numbers, measure

NAN, INF = math.nan, math.inf
SMALL, LARGE = 7, 5000  # on either side of the size up to which tensors are measured together


def made(size: int, dtype: torch.dtype, *faults: float) -> Tensor:
    torch.manual_seed(size)
    grad = torch.randn(size, dtype=dtype) * 3
    grad[::3] = 0.0
    for place, fault in enumerate(faults):
        grad[place + 1] = fault
    return grad


def lists(dtype: torch.dtype) -> dict[str, list[Tensor]]:
    small = [made(SMALL, dtype), made(1, dtype), made(SMALL + 4, dtype)]
    real = not dtype.is_complex
    return {
        "small": small,
        "one": [made(SMALL, dtype)],
        "large": [made(LARGE, dtype), made(LARGE + 1, dtype)],
        "both": [*small, made(LARGE, dtype)],
        "strange": [made(SMALL, dtype, NAN), made(SMALL + 1, dtype, INF, -INF if real else INF)],
        "strange and large": [made(LARGE, dtype, NAN), made(LARGE, dtype, INF), made(LARGE, dtype)],
        "transposed": [made(SMALL * 6, dtype).view(6, SMALL).t(), made(SMALL, dtype)],
        "gaps": [made(2 * LARGE, dtype)[::2], made(4 * LARGE, dtype).view(-1, 1, 4)[:, :, 1:3]],
        "empty": [made(SMALL, dtype), torch.zeros(0, dtype=dtype), torch.zeros(3, dtype=dtype)],
    }


def expected(stat: str, grad: Tensor) -> float:
    """Return a statistic in plain Python."""
    numbers: list[Any] = grad.flatten().tolist()
    sizes = [abs(number) for number in numbers]
    finite = all(map(math.isfinite, sizes))
    if stat == "nonfinite":
        return sum(not math.isfinite(size) for size in sizes)
    if stat == "zeros":
        return numbers.count(0.0)
    if any(map(math.isnan, sizes)) or not (numbers or stat in ("l1", "l2", "linf")):
        return NAN
    # The spread around an infinite mean is NaN.
    power = 2 if finite else 1
    mean = sum(numbers) / max(len(numbers), 1)
    way: dict[str, Callable[[], float]] = {
        "l1": lambda: sum(sizes),
        "l2": lambda: math.sqrt(sum(size**power for size in sizes)),
        "linf": lambda: max(sizes, default=0.0),
        "min": lambda: min(numbers),
        "max": lambda: max(numbers),
        "mean": lambda: mean,
        "std": lambda: math.sqrt(sum(abs(n - mean) ** 2 for n in numbers) / len(numbers)),
    }
    return way[stat]() if finite or stat != "std" else NAN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("kind", lists(torch.float32))
def test_many_at_once_one_by_one_and_by_hand(kind: str, dtype: torch.dtype) -> None:
    grads = lists(dtype)[kind]
    before = [grad.clone() for grad in grads]
    for stat in ("l1", "l2", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"):
        if dtype.is_complex and stat in ("mean", "min", "max"):
            continue  # no such rule binds
        together = measure.statistics(stat, grads)
        assert together.dtype == torch.float32
        assert together.shape == (len(grads),)
        alone = [float(measure.statistic(stat, grad)) for grad in grads]
        wanted = [expected(stat, grad) for grad in grads]
        assert together.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5, nan_ok=True), stat
        assert alone == pytest.approx(wanted, rel=1e-5, abs=1e-5, nan_ok=True), stat
    for grad, kept in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_a_sparse_gradient_leaves_out_is_zero(size: int) -> None:
    values = made(size, torch.float32).abs() + 1.0
    dense = torch.zeros(2 * size)
    dense[::2] = values
    places = torch.arange(0, 2 * size, 2)[None]
    sparse = torch.sparse_coo_tensor(places, values, (2 * size,), check_invariants=True)
    for stat in ("l1", "l2", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"):
        found = measure.statistics(stat, [sparse, dense]).tolist()
        assert found == pytest.approx([expected(stat, dense)] * 2, rel=1e-5), stat


@pytest.mark.parametrize("gaps", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_elements_lose_no_digits(dtype: torch.dtype, gaps: int) -> None:
    grad = torch.full((2**23,), 9.0, dtype=dtype)[::gaps].fill_(0.1)
    wanted = float(grad[0]) * math.sqrt(len(grad))
    assert float(_numbers.norm(grad)) == pytest.approx(wanted, rel=2e-6)
    assert _numbers.norms([grad]).tolist() == pytest.approx([wanted], rel=2e-6)


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
@pytest.mark.parametrize("places", [[0, 0, 0], [0, 1, 0], [2, 0, 1]])
def test_each_group_of_tensors_has_its_norm(places: list[int], order: float) -> None:
    norms = torch.tensor([3.0, 4.0, 12.0])
    wanted = []
    for group in range(max(places) + 1):
        members = [place == group for place in places]
        wanted.append(torch.linalg.vector_norm(norms[members], order).item())
    assert _numbers.over(norms, places, order).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("others", [torch.bfloat16, torch.float16, torch.float64])
def test_norms_of_two_dtypes_are_as_exact_as_those_of_one(others: torch.dtype) -> None:
    grads = [made(500, torch.float32), made(501, others)]
    for order in (2.0, INF):
        wanted = [torch.linalg.vector_norm(grad.double(), order).item() for grad in grads]
        assert _numbers.norms(grads, order).tolist() == pytest.approx(wanted, rel=1e-6)
        assert _numbers.norms(grads[::-1], order).tolist() == pytest.approx(wanted[::-1], rel=1e-6)
