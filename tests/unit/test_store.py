"""Rows of records: bounded, replaced within a step, and absent where nothing was measured."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from typing import Any

import pytest
from runs import add

from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.memory import merged

KEY = Key("norms", "l2", "accumulated", ("a", "b"))


def values(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


def test_the_oldest_rows_make_room() -> None:
    # A row of two values takes eight bytes of numbers and 160 of what goes with them.
    records = Records(limit_bytes=100 * 168)
    for step in range(1000):
        add(records, KEY, step, values(float(step), 0.0))
    assert len(records) == 100
    assert records.dropped == 900
    (series,) = records.series("a", "l2")
    assert series.values_of("a") == [(step, float(step)) for step in range(900, 1000)]
    assert series.last("a") == [(999, 999.0)]
    # All series reach back as far: the one that is new takes its room from the oldest rows of all.
    other = Key("other", "l2", "step", ("a", "b"))
    for step in range(1000, 1050):
        add(records, other, step, values(1.0, 1.0))
    assert len(records) == 100
    assert series.values_of("a")[0] == (950, 950.0)
    assert records.series("a", "l2", "other")[0].values_of("a")[0] == (1000, 1.0)


@pytest.mark.parametrize("replace", [False, True])
def test_what_is_kept_is_what_was_put_in_whatever_makes_room(*, replace: bool) -> None:
    chance = random.Random(3)
    records = Records(limit_bytes=100 * 168)
    all_of_them: list[tuple[int, tuple[float, float], frozenset[int]]] = []
    for step in range(2000):
        numbers = chance.random(), chance.random()
        absent = frozenset(chance.sample(range(2), chance.randint(0, 2)))
        again = replace and bool(step % 3)
        add(records, KEY, step // 2, values(*numbers), absent, replace=again)
        if again and all_of_them and all_of_them[-1][0] == step // 2:
            all_of_them.pop()
        all_of_them.append((step // 2, numbers, absent))
    (series,) = records
    kept = all_of_them[-len(series) :]
    assert len(series) == 100
    assert len(all_of_them) - len(series) == records.dropped
    for column, name in enumerate(KEY.names):
        cells: list[Any] = [(s, pytest.approx(n[column])) for s, n, a in kept if column not in a]
        assert series.values_of(name) == cells
        assert series.last(name) == series.values_of(name)[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 100])
@pytest.mark.parametrize("holes", [False, True])
def test_no_more_memory_is_taken_than_the_bound_says(width: int, *, holes: bool) -> None:
    limit = 2**19
    key = Key("norms", "l2", "accumulated", tuple(f"p{number}" for number in range(width)))
    row = values(*[1.0] * width)
    tracemalloc.start()
    try:
        records = Records(limit)
        for step in range(2 * limit // (4 * width)):
            # Other tensors have no gradient in each step.
            absent = frozenset({step % width}) if holes else frozenset()
            add(records, key, step, bytes(bytearray(row)), absent)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert records.dropped
    assert limit / 2 < taken < 1.3 * limit


@pytest.mark.parametrize(
    ("point", "rows"), [("accumulated", [9.0, 2.0]), ("backward", [1.0, 9.0, 2.0])]
)
def test_series_that_follow_each_other_are_one_history(point: str, rows: list[float]) -> None:
    records = Records()
    first, second = Key("n", "l2", point, ("a", "b")), Key("n", "l2", point, ("a",))
    add(records, first, 0, values(1.0, 1.0))
    add(records, second, 0, values(9.0))
    add(records, second, 1, values(2.0))
    found = merged(records.series("a", "l2"), "a")
    assert [value for _, value in found] == rows
