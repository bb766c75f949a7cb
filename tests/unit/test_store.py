"""Rows of records: bounded, replaced within a step, and absent where nothing was measured."""

from __future__ import annotations

from array import array

import pytest

from gradsurgeon.store import Key, Records, merged

KEY = Key("norms", "l2", "accumulated", ("a", "b"))


def values(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


def test_rows_by_column() -> None:
    records = Records()
    records.add(KEY, 0, values(1.0, 2.0))
    records.add(KEY, 1, values(3.0, float("nan")))
    (series,) = records.series("a", "l2")
    assert series.of("a") == [(0, 1.0), (1, 3.0)]
    assert str(series.of("b")) == "[(0, 2.0), (1, nan)]"
    assert records.series("a", "l1") == records.series("c", "l2") == []
    assert records.series("a", "l2", "other") == []


def test_the_last_row_of_a_step_stands() -> None:
    records = Records()
    for number in (1.0, 2.0):
        records.add(KEY, 0, values(number, number), replace=True)
    records.add(KEY, 1, values(3.0, 3.0), replace=True)
    assert records.series("a", "l2")[0].of("a") == [(0, 2.0), (1, 3.0)]


def test_what_is_absent_has_no_value() -> None:
    records = Records()
    records.add(KEY, 0, values(1.0, 0.0), frozenset({1}))
    records.add(KEY, 1, values(0.0, 5.0), frozenset({0}))
    (series,) = records.series("a", "l2")
    assert (series.of("a"), series.of("b")) == ([(0, 1.0)], [(1, 5.0)])


def test_the_oldest_rows_make_room() -> None:
    records = Records(limit_bytes=100 * 2 * 4)
    for step in range(1000):
        records.add(KEY, step, values(float(step), 0.0))
    assert len(records) == 100
    assert records.dropped == 900
    assert records.series("a", "l2")[0].of("a")[0] == (900, 900.0)
    records.add(Key("other", "l2", "step", ("a", "b")), 0, values(1.0, 1.0))
    assert len(records) == 51
    assert records.series("a", "l2", "norms")[0].of("a")[0] == (950, 950.0)


@pytest.mark.parametrize(
    ("point", "rows"), [("accumulated", [9.0, 2.0]), ("backward", [1.0, 9.0, 2.0])]
)
def test_series_that_follow_each_other_are_one_history(point: str, rows: list[float]) -> None:
    records = Records()
    first, second = Key("n", "l2", point, ("a", "b")), Key("n", "l2", point, ("a",))
    records.add(first, 0, values(1.0, 1.0))
    records.add(second, 0, values(9.0))
    records.add(second, 1, values(2.0))
    found = merged(records.series("a", "l2"), "a")
    assert [value for _, value in found] == rows
