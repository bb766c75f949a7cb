"""The records of a run as a table of pandas: every value once, with its type."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import add, meta, values, write

from gradsurgeon import GradSurgeonError, RecordError, Run, open_run
from gradsurgeon.cli import main
from gradsurgeon.records.store import Key, rank_file
from gradsurgeon.records.store.writer import RunWriter

NAN, INF = math.nan, math.inf
TYPES = {
    "step": "int64",
    "rank": "int32",
    "rule": "category",
    "point": "category",
    "stat": "category",
    "name": "category",
    "value": "float32",
}


def make(path: Path) -> None:
    """Write two ranks, two rules and statistics, a step without a gradient, NaN and infinity."""
    writers = [write(path, {"w": [0.1, NAN, 3.0], "b": [None, 5.0, INF]}, rank=r) for r in (0, 1)]
    add(writers[0], Key("peaks", "max", "step", ("w",)), 2, values(-INF))
    for writer in writers:
        writer.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    make(tmp_path / "run")
    with open_run(tmp_path / "run") as opened:
        yield opened


def test_every_value_has_a_line_and_no_other(run: Run) -> None:
    table = run.to_pandas()
    assert dict(table.dtypes.astype(str)) == TYPES
    norms = ("norms", "accumulated", "l2")
    lines = [(0, "w"), (1, "w"), (1, "b"), (2, "w"), (2, "b")]
    expected = [(step, rank, *norms, name) for rank in (0, 1) for step, name in lines]
    expected.insert(5, (2, 0, "peaks", "step", "max", "w"))
    texts = table.drop(columns="value")
    assert list(texts.itertuples(index=False, name=None)) == expected
    # To the bit: 0.1 is that of float32.
    numbers = [0.1, NAN, 5.0, 3.0, INF]
    assert table["value"].to_numpy().tobytes() == values(*numbers, -INF, *numbers)


def test_lines_are_those_of_the_export(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.path), "--format", "csv"]) == 0
    rows = [tuple(row) for row in csv.reader(io.StringIO(capsys.readouterr().out))]
    table = run.to_pandas()
    assert rows[0] == tuple(table.columns)
    assert rows[1:] == [
        (*map(str, row[:-1]), f"{row[-1]:.9g}") for row in table.itertuples(index=False, name=None)
    ]


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ({"stat": "max"}, 1),
        ({"stat": "l2", "name": "b"}, 4),
        ({"name": "re:w|x"}, 7),
        ({"name": "{w,b}", "rule": "norms"}, 10),
        ({"rule": "peaks"}, 1),
    ],
)
def test_parts(run: Run, asked: dict[str, str], lines: int) -> None:
    table = run.to_pandas(**asked)
    assert len(table) == lines
    if "stat" in asked:
        assert list(table["stat"].unique()) == [asked["stat"]]
    if asked.get("name") == "b":
        assert list(table["name"].unique()) == ["b"]
        assert table["value"].tolist() == [5.0, INF] * 2


@pytest.mark.parametrize("column", ["name", "stat", "rule"])
def test_what_does_not_fit_is_said_as_the_export_says_it(
    run: Run, column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecordError) as error:
        run.to_pandas(**{column: "x"})
    assert "; recorded: norms l2, peaks max" in str(error.value)
    assert main(["export", str(run.path), "--format", "csv", f"--{column}", "x"]) == 2
    assert capsys.readouterr().err == f"gradsurgeon: {error.value}\n"


def test_nothing_recorded_at_all(tmp_path: Path) -> None:
    RunWriter(tmp_path, meta=meta()).close()
    with open_run(tmp_path) as run, pytest.raises(RecordError, match="nothing was recorded"):
        run.to_pandas()


def test_a_table_without_a_line_has_its_types(tmp_path: Path) -> None:
    write(tmp_path, {"w": [None, None]}).close()
    with open_run(tmp_path) as run:
        table = run.to_pandas()
    assert (len(table), dict(table.dtypes.astype(str))) == (0, TYPES)


def test_blocks_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "_BATCH_ROWS", 3)
    histories = {f"p{i}": [None if s % 5 == i else s + i / 8 for s in range(40)] for i in range(3)}
    write(tmp_path, histories).close()
    with open_run(tmp_path) as run:
        table = run.to_pandas()
    for name, history in histories.items():
        lines = table[table["name"] == name]
        found = list(zip(lines["step"].tolist(), lines["value"].tolist(), strict=True))
        assert found == [(step, value) for step, value in enumerate(history) if value is not None]
    assert set(table["rank"]) == {0}


def test_names_that_no_encoding_has(tmp_path: Path) -> None:
    # The second reads as the first does once its surrogate is escaped.
    names = ("a\udc80", r"a\udc80", "grö\u202eße\n")
    writer = RunWriter(tmp_path, meta=meta(names))
    add(writer, Key("norms", "l2", "step", names), 0, values(1.0, 2.0, 3.0))
    writer.close()
    with open_run(tmp_path) as run:
        table = run.to_pandas()
    assert table["name"].tolist() == [r"a\udc80", r"a\udc80", "grö\u202eße\n"]
    assert table["value"].tolist() == [1.0, 2.0, 3.0]


def test_what_to_install_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(GradSurgeonError) as error:
        run.to_pandas()
    assert str(error.value).startswith("to_pandas needs the library pandas, which cannot")
    assert str(error.value).endswith("pip install 'gradsurgeon[pandas]'")
