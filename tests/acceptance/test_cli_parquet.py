"""`gradsurgeon export --format parquet`, read back by those who read Parquet."""

from __future__ import annotations

import math
import pathlib
import sqlite3
import sys

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import WITHOUT_TORCH, call, call_here
from runs import listing, meta, values, write

from gradsurgeon import open_run
from gradsurgeon.store import Key
from gradsurgeon.store.writer import RunWriter

EXPORT = ("export", "run", "--format", "parquet")
LINES = 6
REFUSED = "is there already and is no export; name another one, or remove it first"


@pytest.fixture
def here(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder with a run of two statistics, with NaN, infinity, and a step without a gradient."""
    writer = write(tmp_path / "run", {"w": [0.1, math.nan, 3.0], "b": [None, 5.0, math.inf]})
    writer.add(Key("norms", "max", "accumulated", ("w",)), 2, values(-math.inf))
    writer.close()
    return tmp_path


def test_what_readers_find(here: pathlib.Path) -> None:
    done = call_here(*EXPORT, "-o", "out.parquet", cwd=here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with open_run(here / "run") as run:
        frame = run.to_pandas()
    found = pd.read_parquet(here / "out.parquet")
    pd.testing.assert_frame_equal(found, frame)
    assert found["value"].to_numpy().tobytes() == frame["value"].to_numpy().tobytes()
    read = pq.read_table(here / "out.parquet")
    assert read.num_rows == LINES
    assert read["name"].to_pylist() == ["w", "w", "b", "w", "b", "w"]
    assert str(read["value"].to_pylist()) == "[0.10000000149011612, nan, 5.0, 3.0, inf, -inf]"
    assert listing(here) == ["out.parquet", "run"]


@pytest.mark.parametrize(
    ("options", "lines"), [(("--stat", "max"), 1), (("--name", "b"), 2), (("--rule", "norms"), 6)]
)
def test_parts(here: pathlib.Path, options: tuple[str, ...], lines: int) -> None:
    assert call_here(*EXPORT, *options, "-o", "out", cwd=here).returncode == 0
    assert pq.read_table(here / "out").num_rows == lines


def test_an_export_is_replaced_as_a_whole(here: pathlib.Path) -> None:
    out = here / "out.parquet"
    for options, lines in (((), LINES), (("--stat", "max"), 1)):
        assert call_here(*EXPORT, *options, "-o", "out.parquet", cwd=here).returncode == 0
        assert pq.read_table(out).num_rows == lines
    out.chmod(0o640)
    before = out.read_bytes()
    (here / "run" / "rank-1.db").write_bytes(b"\x1b" * 1000)
    assert call_here(*EXPORT, "-o", "out.parquet", cwd=here).returncode == 2
    assert (out.read_bytes(), out.stat().st_mode & 0o777) == (before, 0o640)
    assert listing(here) == ["out.parquet", "run"]


def test_a_file_that_cannot_be_finished_leaves_what_was_there(here: pathlib.Path) -> None:
    assert call_here(*EXPORT, "-o", "out", cwd=here).returncode == 0
    before = (here / "out").read_bytes()
    # What a row holds is looked at when it is read, and the file is begun by then.
    with sqlite3.connect(here / "run" / "rank-0.db") as file:
        file.execute("UPDATE rows SET floats = x'00' WHERE step = 2")
    file.close()
    done = call_here(*EXPORT, "-o", "out", cwd=here)
    assert done.returncode == 2
    assert "rank-0.db: is damaged" in done.stderr
    assert (here / "out").read_bytes() == before
    assert listing(here) == ["out", "run"]


def foreign(path: pathlib.Path) -> None:
    """Write files of others: of Parquet, made of an export, cut off, and text."""
    export, frame = path / "export", pd.DataFrame({"step": [1]})
    call_here(*EXPORT, "-o", "export", cwd=path)
    frame.to_parquet(path / "other")
    read = pq.read_table(export)
    pq.write_table(read.append_column("more", read["step"]), path / "wider")
    pq.write_table(read.cast(read.schema.set(0, pa.field("step", pa.int32()))), path / "narrower")
    (path / "cut").write_bytes(export.read_bytes()[:-20])
    (path / "magic").write_bytes(b"PAR1" * 100)
    (path / "garbled").write_bytes(
        export.read_bytes()[:-80] + b"\xff" * 72 + export.read_bytes()[-8:]
    )
    call_here("export", "run", "--format", "csv", "-o", "text", cwd=path)
    (path / "train.py").write_text("print('hours of work')\n")
    (path / "link").symlink_to("train.py")


def test_no_file_of_others_is_written_over(here: pathlib.Path) -> None:
    foreign(here)
    files = [entry for entry in here.iterdir() if entry.is_file() and entry.name != "export"]
    assert len(files) == 9
    files += [here / "run" / "rank-0.db", here / "run" / "run.json"]
    for file in files:
        before = file.read_bytes()
        name = str(file.relative_to(here))
        done = call_here(*EXPORT, "-o", name, cwd=here)
        assert (done.returncode, done.stderr) == (2, f"gradsurgeon: {name}: {REFUSED}\n")
        assert file.read_bytes() == before
    done = call_here("export", "run", "--format", "csv", "-o", "export", cwd=here)
    assert (done.returncode, done.stderr) == (2, f"gradsurgeon: export: {REFUSED}\n")
    (here / "empty").touch()
    assert call_here(*EXPORT, "-o", "empty", cwd=here).returncode == 0
    assert pq.read_table(here / "empty").num_rows == LINES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "`--format parquet` needs `-o FILE`: standard output is for text, and parquet is binary"),
        (("--stat", "l3", "-o", "x"), "nothing recorded fits the rule, statistic and name asked for"),
        (("-o", "no/such/file"), "cannot write no/such/file: No such file or directory"),
        (("-o", "run"), "cannot write run: Is a directory"),
        (("-o", "/dev/full"), "cannot write /dev/full: No space left on device"),
    ],
)  # fmt: skip
def test_what_cannot_be_done(here: pathlib.Path, options: tuple[str, ...], message: str) -> None:
    done = call_here(*EXPORT, *options, cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gradsurgeon: {message}")
    assert done.stderr.count("\n") == 1
    assert listing(here) == ["run"]


def test_without_the_library_it_is_said_what_to_install(
    here: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    done = call_here(*EXPORT, "-o", "out", cwd=here)
    assert done.returncode == 2
    assert done.stderr.startswith("gradsurgeon: the format parquet needs the library pyarrow")
    assert done.stderr.endswith("pip install 'gradsurgeon[arrow]'\n")
    assert listing(here) == ["run"]


@pytest.mark.slow
@pytest.mark.cover_children
def test_without_torch(here: pathlib.Path) -> None:
    done = call(*EXPORT, "-o", "out", cwd=here, code=WITHOUT_TORCH)
    assert (done.returncode, done.stderr) == (0, "")
    assert pq.read_table(here / "out").num_rows == LINES


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_run(tmp_path: pathlib.Path) -> None:
    key = Key("norms", "l2", "step", tuple(f"p{i}" for i in range(500)))
    row = values(*[1.0] * 500)
    for name, steps in (("short", 1_000), ("long", 20_000)):  # 16 and 320 MB as columns
        writer = RunWriter(tmp_path / name, meta=meta(("w",)))
        for step in range(steps):
            writer.add(key, step, row)
        writer.close()
    # Not `ru_maxrss`, which a process has from the one that started it.
    code = (
        "import re, sys\nfrom gradsurgeon.cli import main\nmain(sys.argv[1:])\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())\n"
        "print(int(peak[1]) // 1024, file=sys.stderr)"
    )
    peaks = []
    for name in ("short", "long"):
        options = ("export", name, "--format", "parquet", "-o", f"{name}.parquet")
        peaks.append(int(call(*options, cwd=tmp_path, code=code).stderr))
    assert pq.ParquetFile(tmp_path / "long.parquet").metadata.num_rows == 500 * 20_000
    short, long = peaks
    assert 0 < long < short + 60
