"""Run directories survive what happens to them; training survives what happens to run directories."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import KEY, listing, meta, refuse_wal, values, write

from gradsurgeon import Event, RecordError
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.database import _on_network
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter


def journal_mode(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path / "rank-0.db")) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


def event(message: str = "bad", step: int = 3) -> Event:
    return Event("trap", "nans", step, 0, "a.bias", message)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "deep" / "run", meta=meta())
    writer.add(KEY, 0, values(1.0, 2.0))
    writer.add(KEY, 1, values(0.0, float("nan")), frozenset({0}))
    writer.add(KEY, 2, values(float("inf"), 1e6))
    writer.statuses({"norms": RuleStatus(2, 4, 1, 1, ("a word",))})
    writer.event(event())
    writer.close()
    with open_run(tmp_path / "deep" / "run") as run:
        assert run.history("a.weight") == [(0, 1.0), (2, float("inf"))]
        assert str(run.history("a.bias")) == "[(0, 2.0), (1, nan), (2, 1000000.0)]"
        assert run.events == [event()]
        assert run.status() == {"norms": RuleStatus(2, 4, 1, 1, ("a word",))}
        assert run.states == {0: "finished"}
        assert run.meta["rules"]["text"] == "version: 1"


def test_a_finished_run_is_one_plain_file_per_rank(tmp_path: Path) -> None:
    writer = write(tmp_path, {"w": [1.0]})
    assert journal_mode(tmp_path) == "wal"
    writer.close()
    writer.close()
    assert listing(tmp_path) == ["rank-0.db", "run.json"]
    assert journal_mode(tmp_path) == "delete"


def test_a_row_is_replaced_before_and_after_its_commit(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, meta=meta())
    writer.add(KEY, 0, values(1.0, 1.0), replace=True)
    writer.add(KEY, 0, values(2.0, 2.0), replace=True)
    writer.commit()
    writer.add(KEY, 0, values(3.0, 3.0), frozenset({0}), replace=True)
    writer.commit()
    writer.add(KEY, 1, values(4.0, 4.0), replace=True)
    writer.add(KEY, 1, values(5.0, 5.0))
    writer.close()
    with open_run(tmp_path) as run:
        assert run.history("a.bias") == [(0, 3.0), (1, 4.0), (1, 5.0)]
        assert run.history("a.weight") == [(1, 4.0), (1, 5.0)]


def test_one_commit_per_second_and_one_per_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    writer = RunWriter(tmp_path, meta=meta())

    def rows() -> int:
        with open_run(tmp_path) as run:
            return sum(len(series) for series in run)

    def commit_where_due() -> None:
        if writer.is_due():
            writer.commit()

    writer.add(KEY, 0, values(1.0, 1.0))
    now = 100.9
    commit_where_due()
    assert rows() == 0
    now = 101.0
    commit_where_due()
    assert rows() == 1
    writer.add(KEY, 1, values(1.0, 1.0))
    commit_where_due()
    assert rows() == 1
    writer.event(event())
    assert rows() == 2
    # A trap that trips in every step does not put off what is written once per second: the statuses of the rules.
    now = 101.5
    writer.event(event())
    now = 102.1
    writer.event(event())
    assert writer.is_due()
    writer.close()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", r"file: cannot write records there: File exists; pass"),
        ("file/run", r"cannot write records there: Not a directory; pass"),
        ("/proc/nothing/run", r"cannot write records there: No such"),
        # Not even root can write there.
        ("/proc/self", r"/proc/self: cannot write records there: .*; pass a dir"),
        ("x" * 300, r"cannot write records there: File name too long"),
    ],
)
def test_places_that_cannot_be_written(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=message):
        RunWriter(tmp_path / place, meta=meta())
    assert listing(tmp_path) == ["file"]


def test_what_was_not_begun_leaves_nothing(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", {"w": [1.0]})
    writer.discard()
    writer.discard()
    assert listing(tmp_path) == []
    write(tmp_path / "run", {"w": [1.0]}).close()


def test_a_failure_while_it_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RecordError, match="No space left on device"):
        RunWriter(tmp_path / "run", meta=meta())
    assert listing(tmp_path) == []


def test_a_file_system_without_shared_memory_gets_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_wal(monkeypatch)
    writer = RunWriter(tmp_path, meta=meta())
    assert writer._connection.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
    for step in range(300):
        writer.add(KEY, step, values(1.0, float(step)))
        if step % 100 == 0:
            writer.event(event(step=step))
    with open_run(tmp_path) as run:
        assert len(run.history("a.bias")) == 201
    writer.close()
    assert not writer.failed
    with open_run(tmp_path) as run:
        assert len(run.history("a.bias")) == 300
        assert len(run.events) == 3


@pytest.mark.parametrize(
    ("mount", "network"),
    [
        ("nfs4", True),
        ("fuse.sshfs", True),
        ("ext4", False),
        ("nfsd", False),
    ],
)
def test_network_file_systems_are_known_by_their_mounts(
    tmp_path: Path, mount: str, network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "data set" / "run"
    run.mkdir(parents=True)
    point = str(tmp_path / "data set").replace(" ", "\\040")
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/root / ext4 rw 0 0\n"
        f"other:/ {point}x nfs4 rw 0 0\n"
        f"share {point} {mount} rw,relatime 0 0\n"
    )
    assert not _on_network(run)
    monkeypatch.setattr("gradsurgeon.records.store.database._MOUNTS", mounts)
    assert _on_network(run) is network
    assert not _on_network(tmp_path)


def test_on_a_network_file_system_no_log_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsurgeon.records.store.database._on_network", lambda _: True)
    writer = write(tmp_path, {"w": [1.0]})
    assert journal_mode(tmp_path) == "delete"
    assert writer._connection.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
    writer.close()


def test_odd_texts_come_back_as_data(tmp_path: Path) -> None:
    name = "w'); DROP TABLE rows; --\x1b[2J\0é\udcff"
    writer = RunWriter(tmp_path, meta=meta((name,)))
    writer.add(Key("norms", "l2", "step", (name,)), 0, values(1.0))
    writer.event(event(message="broken \udcff name"))
    writer.close()
    with open_run(tmp_path) as run:
        assert run.history(name) == [(0, 1.0)]
        assert run.events[0].message == "broken \\udcff name"


@pytest.mark.slow
def test_the_store_needs_neither_torch_nor_sqlite_for_memory() -> None:
    # Measuring coverage needs SQLite itself, so only what the import adds counts.
    code = (
        "import sys; before = set(sys.modules); import gradsurgeon.records.store; "
        "sys.exit(bool({'torch', 'sqlite3'} & (set(sys.modules) - before)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys, gradsurgeon.records.store.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
