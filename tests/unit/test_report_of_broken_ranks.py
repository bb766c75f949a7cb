"""Reports of runs of which the file of a rank is damaged, cut off or missing: the other ranks are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import call_here, refused
from pairs import singly
from runs import meta, write

from gradsurgeon import RecordError, open_run
from gradsurgeon.records.store.run import open_run as open_stored
from gradsurgeon.report import from_run

pytestmark = pytest.mark.slow

STEPS = 3000


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Return a run of three ranks, each with a parameter of its own."""
    path = tmp_path / "run"
    for writer in [write(path, {f"p{rank}": [1.0] * STEPS}, rank=rank) for rank in range(3)]:
        writer.close()
    return path


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@singly(size=[0, 1000, 40_000], rank=[0, 1, 2])
def test_a_file_that_was_cut_off_is_named_and_the_others_are_reported_without_it(
    ranks: Path, rank: int, size: int
) -> None:
    file = ranks / f"rank-{rank}.db"
    cut(file, size)
    for options in ([], ["--html", "page.html"], ["--format", "json"]):
        done = call_here("report", str(ranks), *options, cwd=ranks.parent)
        refused(done)
        assert f"rank-{rank}.db: " in done.stderr
    file.unlink()
    done = call_here("report", str(ranks), cwd=ranks.parent)
    assert f"; no file of rank {rank} is here" in done.stdout or rank == 2
    shown = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  p")]
    assert shown == ["parameter", *(f"p{one}" for one in range(3) if one != rank)]


@pytest.mark.parametrize("rank", [0, 2])
def test_damage_that_shows_when_rows_are_read_is_named_too(ranks: Path, rank: int) -> None:
    file = ranks / f"rank-{rank}.db"
    data = bytearray(file.read_bytes())
    data[-30_000:] = b"\xff" * 30_000
    file.write_bytes(data)
    with (
        open_run(ranks) as run,  # the tables are fine
        pytest.raises(RecordError, match=rf"rank-{rank}\.db: .*"),
    ):
        from_run(run)


def test_of_files_that_are_all_damaged_there_is_no_report(ranks: Path) -> None:
    for rank in range(3):
        cut(ranks / f"rank-{rank}.db", 40_000 if rank else 100)
    done = call_here("report", str(ranks), cwd=ranks.parent)
    refused(done)
    assert done.stderr.startswith("gradsurgeon: ")
    with pytest.raises(RecordError):
        open_run(ranks)


def test_a_reader_who_did_not_ask_gets_no_part_of_a_run(ranks: Path) -> None:
    cut(ranks / "rank-1.db", 100)
    with pytest.raises(RecordError, match=r"rank-1\.db"):
        open_run(ranks)


@pytest.mark.parametrize(
    ("world", "removed", "said"),
    [
        (3, [], ""),
        (None, [], ""),
        (None, [1], "no file of rank 1 is here, such as rank-1.db"),
        (3, [2], "no file of rank 2 is here, such as rank-2.db"),
        (5, [1], "no file of rank 1, 3, 4 is here, such as rank-1.db"),
        (True, [1], "no file of rank 1"),
        (10**30, [1], "no file of rank 1"),
    ],
)
def test_a_file_that_is_missing_is_named(
    ranks: Path, world: int | None, removed: list[int], said: str
) -> None:
    (ranks / "run.json").write_text(json.dumps({"format": 3, **meta(), "ranks": world}))
    for rank in removed:
        (ranks / f"rank-{rank}.db").unlink()
    with open_stored(ranks) as run:
        notes = [note for note in from_run(run).notes if note.startswith("no file of")]
    assert [note[: len(said)] for note in notes] == [said] * bool(said)
