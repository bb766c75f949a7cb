"""A gradient whose elements are finite has its norm, though their squares overflow or vanish, and is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pairs import pairwise
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import _numbers

DTYPES = [torch.float32, torch.bfloat16]
# Measured together with others, alone, and by a dot product.
SIZES = [4, 2000, 2**18]


def rule(**options: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"id": "r", "params": "*", **options}]}


@pairwise(
    dtype=[*DTYPES, torch.complex64],
    unit=[1e30, 1e-20, 1e-30],
    size=SIZES,
    order=[1.0, 2.0, 3.0],
)
def test_the_norm_is_that_of_float64(
    dtype: torch.dtype, unit: float, size: int, order: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    grad = (torch.randn(size, generator=generator) * unit).to(dtype)
    wide = grad.to(torch.promote_types(dtype, torch.float64)) / unit
    wanted = float(torch.linalg.vector_norm(wide, order)) * unit
    small = torch.ones(3, dtype=dtype)
    measured = _numbers.norms([small, grad, small], order)
    assert measured.tolist() == pytest.approx(
        [3 ** (1 / order), wanted, 3 ** (1 / order)], rel=1e-4
    )
    assert float(_numbers.norm(grad, order)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("size", [*SIZES, 0])
def test_a_gradient_of_zeros_has_norm_0(size: int) -> None:
    zeros = torch.zeros(size)
    assert _numbers.norms([zeros, torch.ones(3000), zeros]).tolist()[::2] == [0.0, 0.0]
    assert float(_numbers.norm(zeros)) == 0.0


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beside", [4, 3000])
def test_a_small_gradient_is_recorded_whatever_it_is_measured_beside(
    beside: int, dtype: torch.dtype, passes: int
) -> None:
    model = nn.ParameterList([torch.zeros(4, dtype=dtype), torch.zeros(beside)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    points = ("backward", "accumulated", "step")
    logs = [{"id": at, "action": "norm-log", "params": "*", "at": at} for at in points]
    with gradsurgeon.apply(model, {"version": 1, "rules": logs}, optimizer=optimizer) as session:
        for _ in range(passes):
            torch.stack([(one * 1e-30).float().sum() for one in model]).sum().backward()
        optimizer.step()
        for at in points:
            expected = [2e-30] * passes if at == "backward" else [2e-30 * passes]
            found = [value for _, value in session.history("0", rule=at)]
            assert found == pytest.approx(expected, rel=1e-2, abs=0), at


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_has_no_finite_norm(dtype: torch.dtype, bad: float) -> None:
    grad = torch.full((2000,), 1e20, dtype=dtype)
    grad[7] = bad
    for found in (_numbers.norms([grad])[0], _numbers.norm(grad)):
        assert found.isnan() if math.isnan(bad) else found.isinf()


@pytest.mark.parametrize("per", ["parameter", "rule"])
@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("size", [1e20, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_norm_cuts_it(dtype: torch.dtype, size: float, at: str, per: str) -> None:
    if (at, per) == ("backward", "rule"):
        return
    model = nn.Linear(50, 40).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradsurgeon.apply(
        model, rule(action="clip-norm", max_norm=1.0, at=at, per=per), optimizer=optimizer
    ) as session:
        (model(torch.ones(1, 50, dtype=dtype)).sum() * size).backward()
        optimizer.step()
    grads = [
        param.grad.double().flatten() for param in model.parameters() if param.grad is not None
    ]
    lengths = (
        [float(torch.cat(grads).norm())] if per == "rule" else [float(g.norm()) for g in grads]
    )
    assert lengths == pytest.approx([1.0] * len(lengths), rel=2e-2)
    assert [event.kind for event in session.events] == []


@pytest.mark.parametrize("per", ["parameter", "rule"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_spike_of_finite_elements_is_cut(dtype: torch.dtype, per: str) -> None:
    model = nn.Linear(50, 40, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    above = {"sigmas": 2.5, "warmup": 10}
    with gradsurgeon.apply(
        model, rule(action="spike-trap", above=above, per=per), optimizer=optimizer
    ) as session:
        grad = Tensor()
        for step in range(31):
            grad = torch.randn(40, 50).to(dtype)
            model.weight.grad = grad.mul_(1e20) if step == 30 else grad
            optimizer.step()
    assert float(grad.double().norm()) < 100
    assert [event.kind for event in session.events if event.step == 30] == ["spike"]


def test_a_sparse_vector_alone_has_a_norm() -> None:
    grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True
    )
    assert _numbers.norms([grad]).tolist() == [5.0]
