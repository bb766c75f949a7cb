"""Statistics of single tensors: of what they were when they came by, in rows of many columns."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from ranks import Json
from torch import Tensor

import gradsurgeon
from gradsurgeon.actions import ObserverRule
from gradsurgeon.records import device_queue
from gradsurgeon.records.device_queue import PendingStatistics
from gradsurgeon.tensors import _nonfinite, measure
from gradsurgeon.tensors.statistics import STATISTICS, columns_of, statistic_of

INF = float("inf")


def logging(*stats: str, rule: str = "r", tensor: str = "output") -> ObserverRule:
    entry: Json = {"id": rule, "action": "norm-log", "modules": "*", "tensor": tensor}
    (found,) = gradsurgeon.load({"version": 1, "rules": [{**entry, "stats": list(stats)}]}).rules
    assert isinstance(found, ObserverRule)
    return found


def number(value: float) -> Tensor:
    return torch.tensor([value])


def rows(pending: PendingStatistics) -> list[tuple[int, tuple[str, ...], dict[str, float]]]:
    """Return step, names and values by name of each row."""
    return [
        (
            row.step,
            row.key.names,
            {
                row.key.names[column]: value
                for column, value in zip(row.columns, values.tolist(), strict=True)
            },
        )
        for row, values in pending.take_rows()
    ]


TENSORS = [
    torch.linspace(-2, 3, 12).reshape(3, 4),
    torch.tensor(-4.0),
    torch.linspace(-2, 3, 5000).reshape(50, 100).t(),  # large, not contiguous
    torch.tensor([1.0, INF, float("nan"), -INF]),
    torch.zeros(0, 3),
    torch.tensor([1e-30, 2.0], dtype=torch.float64),
    torch.tensor([300.0, -200.0], dtype=torch.float16),
    torch.tensor([0.0, 1.5]).expand(4, 2),
    torch.tensor([[0.0, 2.0], [0.0, -3.0]]).to_sparse(),
]


def test_numbers_are_those_of_each_tensor_by_itself() -> None:
    stats = tuple(stat for stat, how in STATISTICS.items() if not how.of_update)
    pending = PendingStatistics()
    for place, tensor in enumerate(TENSORS):
        pending.add(logging(*stats), str(place), 0, tensor)
    taken = list(pending.take_rows())
    assert [row.key.stat for row, _ in taken] == [*chain.from_iterable(map(columns_of, stats))]
    for row, values in taken:
        stat = statistic_of(row.key.stat)
        expected = [measure.statistic(stat, tensor) for tensor in TENSORS]
        if expected[0].dim():
            column = columns_of(stat).index(row.key.stat)
            expected = [one[column] for one in expected]
        torch.testing.assert_close(values, torch.stack(expected), equal_nan=True)


@pytest.mark.parametrize("size", [4, 5000])
def test_what_is_written_later_is_not_measured(size: int) -> None:
    tensor, pending = torch.full((size,), 3.0), PendingStatistics()
    pending.add(logging("max"), "a", 0, tensor)
    tensor.fill_(7.0)
    pending.add(logging("max"), "b", 0, tensor)
    assert rows(pending) == [(0, ("a", "b"), {"a": 3.0, "b": 7.0})]


def test_a_name_stays_where_it_is() -> None:
    pending, rule = PendingStatistics(), logging("max")
    seen = []
    for step, names in enumerate(["ab", "b", "cba", "ca"]):
        for name in names:
            pending.add(rule, name, step, number(float(step)))
        seen += rows(pending)
    assert seen == [
        (0, ("a", "b"), {"a": 0.0, "b": 0.0}),
        (1, ("a", "b"), {"b": 1.0}),
        (2, ("c",), {"c": 2.0}),
        (2, ("a", "b"), {"a": 2.0, "b": 2.0}),
        (3, ("c",), {"c": 3.0}),
        (3, ("a", "b"), {"a": 3.0}),
    ]


@pytest.mark.parametrize("most", [2, 100])
def test_columns_ascend_in_whatever_order_modules_run(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Orders that never repeat are not kept.
    monkeypatch.setattr(device_queue, "_MOST_ORDERS", most)
    pending, rule = PendingStatistics(), logging("max")
    for step, names in enumerate(["abc", "acb", "bac", "bca", "abc"]):
        for name in names:
            pending.add(rule, name, step, number(float(ord(name) + step)))
        ((row, values),) = pending.take_rows()
        assert list(row.columns) == [0, 1, 2]
        assert values.tolist() == [float(ord(name) + step) for name in "abc"]


def test_steps_are_apart_that_modules_of_several_optimizers_are_in() -> None:
    pending, rule = PendingStatistics(), logging("max")
    for name, step in (("a", 0), ("b", 7), ("c", 0), ("d", 7), ("a", 1)):
        pending.add(rule, name, step, number(float(ord(name) + step)))
    assert rows(pending) == [
        (0, ("a", "c"), {"a": 97.0, "c": 99.0}),
        (7, ("b", "d"), {"b": 105.0, "d": 107.0}),
        (1, ("a", "c"), {"a": 98.0}),
    ]


def test_rules_are_apart() -> None:
    pending = PendingStatistics()
    pending.add(logging("max"), "a", 0, number(1.0))
    pending.add(logging("min", rule="s"), "a", 0, number(2.0))
    taken = [(row.key.rule, row.key.stat, values.item()) for row, values in pending.take_rows()]
    assert taken == [("r", "max", 1.0), ("s", "min", 2.0)]
    assert len(pending) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex128])
def test_elements_that_are_not_finite_are_counted(dtype: torch.dtype) -> None:
    assert _nonfinite.nonfinite(torch.ones(5, dtype=dtype)) == 0
    bad = torch.tensor([1.0, INF, float("nan"), -INF]).to(dtype)
    assert _nonfinite.nonfinite(bad) == 3
    # A sum that overflows says nothing of the elements.
    large = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
    assert _nonfinite.nonfinite(large) == 0
    assert _nonfinite.nonfinite(torch.full((1,), 1e308 + 1e308j, dtype=torch.complex128)) == 0
    assert _nonfinite.nonfinite(torch.tensor([[0.0, INF]]).to_sparse()) == 1
