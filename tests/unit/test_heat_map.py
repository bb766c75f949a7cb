"""Norms over time in few numbers: nothing that stands out is lost, and every number can be had back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from gradsurgeon.report.heat_map import (
    ABSENT,
    FIRST,
    LOWEST,
    NONFINITE,
    STEP,
    ZERO,
    HeatMap,
    code,
    heat_map,
)
from gradsurgeon.report.whole_norm import Line, whole_norms
from runs import meta, values, write

from gradsurgeon.report import heat_map as module
from gradsurgeon.report import whole_norm
from gradsurgeon.store import Key
from gradsurgeon.store.run import open_run
from gradsurgeon.store.writer import RunWriter


def _norm(cell: int) -> float:
    return float(10 ** (LOWEST + (cell - FIRST) * STEP))


def _map(path: Path, histories: dict[str, Sequence[float | None]]) -> tuple[HeatMap, Line]:
    """Return the map of a run, and the norm of all its tensors."""
    write(path, histories).close()
    with open_run(path) as run:
        names = list(histories)
        found = heat_map(names, dict.fromkeys(run, names))
        (whole,) = whole_norms(found, dict.fromkeys(run, names), names)
        return found, whole.line


def _row(found: HeatMap, name: str) -> list[int]:
    columns, row = len(found.firsts), found.names.index(name)
    return list(found.cells[row * columns : (row + 1) * columns])


@pytest.mark.parametrize("norm", [1.4e-45, 1e-38, 3.1e-7, 0.5, 1.0, 123.456, 3.4e38])
def test_a_cell_gives_two_digits_of_its_norm(norm: float) -> None:
    assert _norm(code(norm)) == pytest.approx(norm, rel=0.0016)
    assert FIRST < code(norm) < code(norm * 1.02) < NONFINITE


def test_what_is_no_norm_has_a_cell_of_its_own() -> None:
    assert [code(value) for value in (0.0, math.nan, math.inf)] == [ZERO, NONFINITE, NONFINITE]
    assert ABSENT < ZERO < FIRST


def test_a_short_run_has_a_column_per_step(tmp_path: Path) -> None:
    found, total = _map(
        tmp_path / "run", {"a": [1.0, 0.0, None, math.nan], "b": [3.0, 4.0, 5.0, None]}
    )
    assert found.firsts == found.lasts == [0, 1, 2, 3]
    assert _row(found, "a") == [code(1.0), ZERO, ABSENT, NONFINITE]
    assert _row(found, "b") == [code(3.0), code(4.0), code(5.0), ABSENT]
    assert total.steps == [0, 1, 2, 3]
    assert total.values[:3] == pytest.approx([math.hypot(1, 3), 4.0, 5.0])
    assert math.isnan(total.values[3] or 0.0)


@pytest.mark.parametrize("most_values", [20 * 2**20, 100], ids=["rows", "summaries"])
def test_a_spike_of_one_step_survives_however_long_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_values: int
) -> None:
    monkeypatch.setattr(module, "MOST_COLUMNS", 20)
    monkeypatch.setattr(module, "_LEAST_COLUMNS", 20)
    monkeypatch.setattr(module, "MOST_VALUES", most_values)
    monkeypatch.setattr(whole_norm, "MOST_VALUES", most_values)
    monkeypatch.setattr(whole_norm, "MOST_COLUMNS", 20)
    spiky, bad, quiet = [0.5] * 20_000, [0.5] * 20_000, [0.25] * 20_000
    spiky[7_001], bad[12_345] = 800.0, math.inf
    found, total = _map(tmp_path / "run", {"spiky": spiky, "bad": bad, "quiet": quiet})
    assert len(found.firsts) <= 20
    assert (found.firsts[0], found.lasts[-1]) >= (0, 19_744)

    def column(step: int) -> int:
        return max(i for i, first in enumerate(found.firsts) if first <= step)

    assert _row(found, "spiky") == [
        code(800.0) if i == column(7_001) else code(0.5) for i in range(len(found.firsts))
    ]
    assert _row(found, "bad") == [
        NONFINITE if i == column(12_345) else code(0.5) for i in range(len(found.firsts))
    ]
    assert set(_row(found, "quiet")) == {code(0.25)}
    # The whole is at least as large as the largest part, and as little finite.
    finite = [value for value in total.values if value is not None and math.isfinite(value)]
    assert max(finite) == pytest.approx(800.0, rel=0.01)
    assert len(finite) == len(total.values) - 1


def test_series_of_different_steps_leave_no_gaps_in_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two optimizers step by turns: each column of a long run has steps of both."""
    monkeypatch.setattr(module, "MOST_COLUMNS", 20)
    monkeypatch.setattr(module, "_LEAST_COLUMNS", 20)
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta(("a", "b")))
    for step in range(1000):
        name = "ab"[step % 2]
        writer.add(Key("norms", "l2", "accumulated", (name,)), step, values(1.0), frozenset())
    writer.close()
    with open_run(tmp_path / "run") as run:
        found = heat_map(["a", "b"], {one: one.key.names for one in run})
    assert len(found.firsts) == 20
    assert set(found.cells) == {code(1.0)}


def test_tensors_of_two_series_share_the_columns(tmp_path: Path) -> None:
    write(tmp_path / "run", {"a": [1.0] * 4}).close()
    found, _ = _map(tmp_path / "other", {"a": [1.0] * 4, "b": [None, None, 2.0, 2.0]})
    assert _row(found, "b") == [ABSENT, ABSENT, code(2.0), code(2.0)]
