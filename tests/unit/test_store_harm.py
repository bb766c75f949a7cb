"""Run directories survive kills and full disks; training survives what happens to run directories."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pairs import singly, slow
from runs import JOB, KEY, add, another_process, listing, meta, refuse_wal, values, write

from gradsurgeon import Event, RecordError
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.store import Key, layout
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report import from_run
from gradsurgeon.report.json_form import to_dict

pytestmark = [pytest.mark.slow, pytest.mark.cover_children]

WRITES_FOR_EVER = """
import sys, time
import pytest
from runs import add, KEY, meta, refuse_wal, values
from gradsurgeon import Event
from gradsurgeon.records.store.writer import RunWriter
if sys.argv[2] == "no wal":
    refuse_wal(pytest.MonkeyPatch())
writer = RunWriter(sys.argv[1], meta=meta())
print("ready", flush=True)
for step in range(10**9):
    add(writer, KEY, step, values(0.0, float(step)))
    if writer.is_due():
        writer.commit()
    if step % 100 == 0:
        print(step, flush=True)
    time.sleep(0.0005)
"""


def event(message: str = "bad", step: int = 3) -> Event:
    return Event("trap", "nans", step, 0, "a.bias", message)


@pytest.mark.slow
@pytest.mark.parametrize("log", ["wal", *slow("no wal")])
def test_kill_minus_nine_loses_the_last_second_at_most(tmp_path: Path, log: str) -> None:
    with another_process(WRITES_FOR_EVER, str(tmp_path), log) as process:
        time.sleep(2.3)
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
    step = int(out.split("\n")[-2])
    with contextlib.closing(sqlite3.connect(tmp_path / "rank-0.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with open_run(tmp_path) as run:
        found = run.history("a.bias")
        assert run.states == {0: "stopped"}
    assert found == [(step, float(step)) for step in range(len(found))]
    assert len(found) > 200
    # What it did in a second, with half a second for a machine that is busy, and the 100 steps that
    # it does before the next word.
    assert step + 100 - len(found) < 1.5 * step / 2.3


def test_a_second_writer_in_this_process_is_refused(tmp_path: Path) -> None:
    writer = write(tmp_path, {"w": [1.0]})
    for _ in range(2):  # looking must not drop the lock
        with pytest.raises(RecordError, match=r"rank-0.db, which is being recorded right now"):
            RunWriter(tmp_path, meta=meta())
    writer.close()
    with pytest.raises(RecordError, match=r"already holds a run \(rank-0.db\)"):
        RunWriter(tmp_path, meta=meta())
    with pytest.raises(RecordError, match=r"\(run.json, whose rank 0 is not recording\)"):
        RunWriter(tmp_path, rank=1)
    assert listing(tmp_path) == ["rank-0.db", "run.json"]


@pytest.mark.parametrize("parent", ["7", "8"])
def test_a_rank_may_be_done_before_another_of_its_job_begins(
    parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunWriter(tmp_path, meta={**meta(), "job": JOB}).close()
    monkeypatch.setattr(layout, "job", lambda: {**JOB, "parent": parent})
    if parent == "7":
        RunWriter(tmp_path, rank=1).close()
        assert listing(tmp_path) == ["rank-0.db", "rank-1.db", "run.json"]
    else:
        with pytest.raises(RecordError, match="mixed up"):
            RunWriter(tmp_path, rank=1)


def test_a_reader_in_the_way_delays_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsurgeon.records.store.database._on_network", lambda _: True)
    writer = RunWriter(tmp_path, meta=meta())
    with contextlib.closing(sqlite3.connect(tmp_path / "rank-0.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM rows").fetchall()
        add(writer, KEY, 0, values(1.0, 1.0))
        begun = time.monotonic()
        writer.commit()
        assert time.monotonic() - begun < 1.0
        assert not writer.failed
        add(writer, KEY, 1, values(2.0, 2.0))
        writer.commit()
        assert reader.execute("SELECT count(*) FROM rows").fetchall() == [(0,)]
        reader.execute("COMMIT")
        writer.commit()
    writer.close()
    with open_run(tmp_path) as run:
        assert run.history("a.bias") == [(0, 1.0), (1, 2.0)]


def test_a_reader_that_never_goes_away_ends_in_one_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsurgeon.records.store.database._on_network", lambda _: True)
    monkeypatch.setattr("gradsurgeon.records.store.writer._MOST_WAITING", 100)
    writer = RunWriter(tmp_path, meta=meta())
    with contextlib.closing(sqlite3.connect(tmp_path / "rank-0.db")) as reader:
        reader.execute("BEGIN EXCLUSIVE")
        for step in range(200):
            add(writer, KEY, step, values(1.0, 1.0))
        writer.commit()
        writer.commit()
    said = writer.news()
    assert len(said) == 1
    assert "database is locked; training goes on" in said[0]


DISK_FULL = """
import resource, sys
from runs import add, meta, values
from gradsurgeon import Event
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.report import from_run
from gradsurgeon.records.store import Key, layout
from gradsurgeon.records.store.writer import RunWriter
writer = RunWriter(sys.argv[1], meta=meta())
said = []
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
key = Key("norms", "l2", "step", tuple(map(str, range(500))))
for step in range(3000):
    add(writer, key, step, values(*[1.0] * 500))
    if step % 50 == 0:
        writer.commit()
        said += writer.news()
writer.event(Event("notice", "", 0, 0, "", "late"))
writer.close()
said += writer.news()
assert writer.failed == said[0] and len(said) == 1, said
print(said[0])
"""


@pytest.mark.slow
def test_a_full_disk_stops_the_records_and_not_the_training(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISK_FULL, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "records are no longer written to" in done.stdout
    assert "training goes on, and records go on in memory" in done.stdout
    with open_run(tmp_path) as run:
        (series,) = run
        rows = list(series.stored())
        assert 0 < len(rows) < 3000
        assert [step for step, *_ in rows] == list(range(len(rows)))
        assert run.states == {0: "stopped"}
    with contextlib.closing(sqlite3.connect(tmp_path / "rank-0.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize("wal", [True, False])
def test_a_directory_that_is_removed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wal: bool
) -> None:
    if not wal:
        refuse_wal(monkeypatch)
    writer = RunWriter(tmp_path / "run", meta=meta())
    add(writer, KEY, 0, values(1.0, 1.0))
    writer.commit()
    shutil.rmtree(tmp_path / "run")
    for step in (1, 2):
        add(writer, KEY, step, values(1.0, 1.0))
        writer.commit()
    writer.close()
    said = writer.news()
    assert len(said) == 1
    assert "No such file or directory; training goes on" in said[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_run_to_its_parent(tmp_path: Path) -> None:
    writer = write(tmp_path, {"w": [1.0, 2.0]})
    writer.commit()
    child = os.fork()
    if child == 0:
        add(writer, Key("norms", "l2", "accumulated", ("w",)), 9, values(9.0))
        writer.event(event())
        writer.close()
        writer._connection.close()
        os._exit(0 if writer.closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    add(writer, Key("norms", "l2", "accumulated", ("w",)), 2, values(3.0))
    writer.commit()
    with open_run(tmp_path) as run:
        assert run.states == {0: "running"}
        assert [step for step, _ in run.history("w")] == [0, 1, 2]
        assert run.events == []
    writer.close()
    assert not writer.failed


def read_all(path: Path) -> None:
    with open_run(path) as run:
        for series in run:
            assert len(list(series.stored())) >= 0
            for name in series.key.names:
                series.values_of(name), series.last(name)
        report = from_run(run)
        assert "\nsummary: " in str(report)
        assert to_dict(report)["norms"] is not None
        assert from_run(run, newest=32).history.tracks is not None
        assert set(run.status()) >= set()


@singly(most=[64, 10**9], kind=["few", "many", "head", "cut", "json"])
def test_whatever_is_damaged_is_refused_by_name_or_read(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsurgeon.report.history.MOST_VALUES", most)
    holes = [None if step % 3 else 1.0 for step in range(300)]
    writer = write(tmp_path, {"a.weight": [float(step) for step in range(300)], "a.bias": holes})
    writer.statuses({"norms": RuleStatus(2, 5, 0, 4, ("odd",))})
    writer.event(event("bäd"))
    writer.close()
    file = tmp_path / ("run.json" if kind == "json" else "rank-0.db")
    whole = file.read_bytes()
    spots = [place for place, byte in enumerate(whole) if byte]  # empty space tells nothing
    if kind == "head":
        spots = [place for place in spots if place < 2 * layout.PAGE]
    refused = read = 0
    for seed in range(120):
        chance = random.Random(seed)
        data = bytearray(whole)
        if kind == "cut":
            del data[chance.randrange(len(data)) :]
        else:
            for _ in range({"many": 50}.get(kind, 2)):
                data[chance.choice(spots)] = chance.randrange(256)
        file.write_bytes(data)
        try:
            read_all(tmp_path)
        except RecordError as error:
            refused += file.name in str(error)
        else:
            read += 1
    assert refused
    assert refused + read == 120
