"""The map of the page: norms over time in few numbers. No spike is lost, and each norm can be read back."""

from __future__ import annotations

import math
import zlib
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from runs import add, meta, values, write

from gradsurgeon.records.store import Key
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report import history, web_page
from gradsurgeon.report.history import Grid
from gradsurgeon.report.web_page import (
    ABSENT,
    NONFINITE,
    ZERO,
    codes,
    page_data,
)


def code(norm: float) -> int:
    one = np.array([[norm]])
    steps = np.array([0])
    return int(codes(Grid(steps, steps, one))[0, 0])


def _norm(cell: int) -> float:
    bits = np.array([(cell - ZERO) << 16], np.uint32)
    return float(bits.view(np.float32)[0])


class _Map:
    """The map of the gradients of a run, and the norm of all its parameters."""

    def __init__(self, path: Path) -> None:
        with open_run(path) as run:
            (kind,) = page_data(run)["kinds"]
        self.firsts, self.lasts = kind["map"]["firsts"], kind["map"]["lasts"]
        raw = zlib.decompress(b64decode(kind["map"]["cells"]))
        half = len(raw) // 2
        cells = [high << 8 | low for high, low in zip(raw[:half], raw[half:], strict=True)]
        columns = len(self.firsts)
        self.rows = {
            name: cells[row * columns : (row + 1) * columns]
            for row, name in enumerate(kind["map"]["names"])
        }
        self.wholes = kind["wholes"]


def _map(path: Path, histories: dict[str, Sequence[float | None]]) -> _Map:
    write(path, histories).close()
    return _Map(path)


@pytest.mark.parametrize("norm", [1e-38, 3.1e-7, 0.5, 1.0, 123.456, 3.3e38])
def test_a_cell_gives_two_digits_of_its_norm(norm: float) -> None:
    assert _norm(code(norm)) == pytest.approx(norm, rel=0.008)
    assert ZERO < code(norm) < code(norm * 1.02) < NONFINITE


def test_zero_and_non_finite_norms_have_cells_of_their_own() -> None:
    assert [code(value) for value in (0.0, math.nan, math.inf)] == [ZERO, NONFINITE, NONFINITE]
    assert ABSENT < ZERO < code(1e-38)


@pytest.mark.parametrize("most_values", [20 * 2**20, 100], ids=["rows", "cells"])
def test_a_spike_of_one_step_survives_however_long_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_values: int
) -> None:
    monkeypatch.setattr(web_page, "_MOST_COLUMNS", 20)
    monkeypatch.setattr(web_page, "_LEAST_COLUMNS", 20)
    monkeypatch.setattr(history, "MOST_VALUES", most_values)
    spiky, bad, quiet = [0.5] * 20_000, [0.5] * 20_000, [0.25] * 20_000
    spiky[7_001], bad[12_345] = 800.0, math.inf
    found = _map(tmp_path / "run", {"spiky": spiky, "bad": bad, "quiet": quiet})
    assert len(found.firsts) <= 20
    assert (found.firsts[0], found.lasts[-1]) >= (0, 19_744)

    few = -(-60_000 // most_values)

    def column(step: int) -> int:
        # A few rows of a long run count as one, by the first of their steps.
        begin = step - step % few
        return max(i for i, first in enumerate(found.firsts) if first <= begin)

    columns = range(len(found.firsts))
    spike, broken = column(7_001), column(12_345)
    assert found.rows["spiky"] == [code(800.0) if i == spike else code(0.5) for i in columns]
    assert found.rows["bad"] == [NONFINITE if i == broken else code(0.5) for i in columns]
    assert set(found.rows["quiet"]) == {code(0.25)}
    # No step is between two columns.
    assert [last + 1 for last in found.lasts[:-1]] == found.firsts[1:]
    assert found.lasts[-1] > 19_999 - few
    # The whole is at least as large as the largest part, and as little finite.
    (total,) = found.wholes
    finite = [value for value in total["values"] if not isinstance(value, str)]
    assert max(finite) == pytest.approx(800.0, rel=0.01)
    assert len(finite) == len(total["values"]) - 1


def test_series_of_different_steps_leave_no_gaps_in_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two optimizers step by turns: each column of a long run has steps of both."""
    monkeypatch.setattr(web_page, "_MOST_COLUMNS", 20)
    monkeypatch.setattr(web_page, "_LEAST_COLUMNS", 20)
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta(("a", "b")))
    for step in range(1000):
        name = "ab"[step % 2]
        add(writer, Key("norms", "l2", "accumulated", (name,)), step, values(1.0), frozenset())
    writer.close()
    found = _Map(tmp_path / "run")
    assert len(found.firsts) == 20
    assert {cell for row in found.rows.values() for cell in row} == {code(1.0)}
