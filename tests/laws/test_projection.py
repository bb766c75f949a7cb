"""Projections: two signed sums, alike however a tensor is laid out and cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from pairs import singly
from small import attach, linears, sgd, take_step
from torch import Tensor

from gradsurgeon.tensors import _numbers, _projection, measure
from gradsurgeon.tensors._projection import PERIOD, projections


def sign(pattern: int, index: Any) -> Any:
    """Return the signs at some indices, by SplitMix64 in unsigned numbers, which wrap around."""
    with np.errstate(over="ignore"):
        state = (np.asarray(index, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state += np.uint64(1000 + pattern)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.where(state >> np.uint64(63), -1.0, 1.0)


@cache
def signs(numel: int) -> Tensor:
    """Return the signs of a tensor with so many elements, for both projections, as the definition says."""
    index = np.arange(numel)
    if numel < 64 * PERIOD:
        return torch.from_numpy(np.stack([sign(3 + k, index) for k in range(2)]))
    column = sign(0, index % PERIOD)
    return torch.from_numpy(np.stack([sign(1 + k, index // PERIOD) * column for k in range(2)]))


def check(tensor: Tensor, *, rel: float = 2e-6) -> None:
    flat = tensor.detach()
    flat = flat.to_dense() if flat.layout is not torch.strided else flat
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.reshape(-1).double()
    difference = (projections(tensor) - signs(len(flat)) @ flat).abs().max().item()
    assert difference <= rel * flat.norm().item()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_complex:
        return torch.complex(random(*shape), random(*shape))
    return torch.randn(shape, generator=generator).to(dtype)


@singly(
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64],
    shape=[(1,), (7, 3), (40, 500), (300, 901), (2, 3, 50, 901)],
)
def test_both_are_the_signed_sums_of_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    check(random(*shape, dtype=dtype))


def test_the_first_signs_are_fixed() -> None:
    # Committed numbers: records of two versions of the package can be compared.
    cpu = torch.device("cpu")
    ones = [int((_projection._signs(pattern, 4096, cpu) > 0).sum()) for pattern in range(5)]
    assert ones == ONES
    first = [
        "".join("+-"[int(one < 0)] for one in sign(pattern, range(16))) for pattern in range(5)
    ]
    assert first == FIRST


ONES = [2044, 2042, 2098, 2077, 2069]
FIRST = [
    "+--+--+--+--+-++",
    "++++--++-----+-+",
    "-++---+++-----+-",
    "-+-+---++---+--+",
    "-+-+---+-+-----+",
]


def test_layouts_are_alike() -> None:
    image = random(8, 16, 12, 12)
    table = random(500, 700)
    assert torch.equal(projections(image), projections(image.to(memory_format=torch.channels_last)))
    assert torch.equal(projections(table), projections(table.t().contiguous().t()))
    assert not torch.allclose(projections(table), projections(table.t()))
    assert projections(torch.empty(0, 4)).tolist() == [0.0, 0.0]
    assert projections(torch.tensor(2.0)).abs().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("width", [3, 200])
def test_sparse_tensors_are_those_of_their_dense_form(width: int) -> None:
    places = torch.tensor([[4, 1999, 4]])
    found = torch.sparse_coo_tensor(places, random(3, width), (2000, width), check_invariants=True)
    check(found)


def test_many_small_tensors_at_once_are_those_of_each() -> None:
    tensors = [random(size) for size in (1, 7, 300, 1024)]
    found = measure.of_kept(["projection", "numel"], tensors)
    each = torch.stack([projections(tensor) for tensor in tensors], 1).float()
    torch.testing.assert_close(found[:2], each, rtol=1e-6, atol=1e-5)
    assert found[2].tolist() == [1, 7, 300, 1024]


@pytest.mark.parametrize("shape", [(60, 70), (700, 600)])
@pytest.mark.parametrize("cuts", [(0,), (1,), (0, 1)])
def test_parts_add_up_to_the_whole(shape: tuple[int, int], cuts: tuple[int, ...]) -> None:
    """Cut as ranks cut: every part is given its indices, and uneven parts and empty ones occur."""
    tensor = random(*shape)
    pieces = [torch.tensor_split(torch.arange(size), 3) if d in cuts else (torch.arange(size),)
              for d, size in enumerate(shape)]  # fmt: skip
    found = torch.zeros(2, dtype=torch.float64)
    for rows, columns in itertools.product(*pieces):
        part = tensor[rows][:, columns]
        found += _projection._of_block(part, [rows, columns], list(shape))
    torch.testing.assert_close(found, projections(tensor), rtol=0, atol=1e-3)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "large": lambda _: random(3_000_001).abs(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
    "every other column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "expanded": lambda x: x[:1, :1].expand(-1, 16, -1, -1),
    "one number": lambda x: x[:1, :1, :1, :1].expand(2, 16, 256, 64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_have_six_digits_in_every_layout(layout: str, dtype: torch.dtype) -> None:
    tensor = LAYOUTS[layout](random(16, 16, 64, 64, dtype=dtype).abs()).to(dtype)
    exact = pytest.approx(tensor.double().norm().item(), rel=1e-6)
    assert measure.statistic("l2", tensor).item() == exact
    assert _numbers.norm(tensor).item() == exact
    assert _numbers.norms([tensor, torch.ones(3)])[0].item() == exact
    assert _numbers.norms([tensor]).item() == exact


def test_records_have_two_columns() -> None:
    model: Any = linears(4, 3, 1)
    log = {"action": "norm-log", "params": "*", "stats": ["l2", "projection"]}
    early = {**log, "id": "early", "at": "backward", "stats": ["projection", "numel"]}
    outputs = {"id": "outputs", "action": "norm-log", "modules": "*", "tensor": "output"}
    optimizer = sgd(model)
    with attach(
        model,
        {**log, "id": "grads"},
        early,
        {**outputs, "stats": ["projection"]},
        {**log, "id": "weights", "tensor": "value"},
        optimizer=optimizer,
    ) as session:
        output = model(torch.randn(2, 4))
        take_step(optimizer, output.sum())
    weight = model[0].weight
    for name, rule, tensor in (
        ("0.weight", "grads", weight.grad),
        ("0.weight", "early", weight.grad),
        ("1", "outputs", output),
        ("0.weight", "weights", weight),
    ):
        found = [session.latest(name, f"projection_{k}", rule=rule) for k in (1, 2)]
        torch.testing.assert_close(torch.tensor(found).double(), projections(tensor))
    assert session.latest("0.weight", "numel", rule="early") == 12
