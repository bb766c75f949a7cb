"""Run directories survive what happens to them; training survives what happens to run directories."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

import pytest
from runs import KEY, add, listing, meta, values, write

from gradsurgeon import Event, RecordError
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.database import _on_network
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter


def journal_mode(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path / "rank-0.db")) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


def event(message: str = "bad", step: int = 3) -> Event:
    return Event("trap", "nans", step, 0, "a.bias", message)


def test_a_finished_run_is_one_plain_file_per_rank(tmp_path: Path) -> None:
    writer = write(tmp_path, {"w": [1.0]})
    assert journal_mode(tmp_path) == "wal"
    writer.close()
    writer.close()
    assert listing(tmp_path) == ["rank-0.db", "run.json"]
    assert journal_mode(tmp_path) == "delete"


def test_a_row_is_replaced_before_and_after_its_commit(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, meta=meta())
    add(writer, KEY, 0, values(1.0, 1.0), replace=True)
    add(writer, KEY, 0, values(2.0, 2.0), replace=True)
    writer.commit()
    add(writer, KEY, 0, values(3.0, 3.0), frozenset({0}), replace=True)
    writer.commit()
    add(writer, KEY, 1, values(4.0, 4.0), replace=True)
    add(writer, KEY, 1, values(5.0, 5.0))
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

    add(writer, KEY, 0, values(1.0, 1.0))
    now = 100.9
    commit_where_due()
    assert rows() == 0
    now = 101.0
    commit_where_due()
    assert rows() == 1
    add(writer, KEY, 1, values(1.0, 1.0))
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
    add(writer, Key("norms", "l2", "step", (name,)), 0, values(1.0))
    writer.event(event(message="broken \udcff name"))
    writer.close()
    with open_run(tmp_path) as run:
        assert run.history(name) == [(0, 1.0)]
        assert run.events[0].message == "broken \\udcff name"
