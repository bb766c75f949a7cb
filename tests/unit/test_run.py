"""Reading run directories: of several ranks, still being written, damaged, foreign, hostile."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import KEY, add, meta, values, write
from small import fields_of

from gradsurgeon import Event, RecordError
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.layout import EVENTS_WITHOUT_MORE
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """Return a finished run with all that there can be."""
    path = tmp_path / "run"
    writer = write(path, {"a.weight": [1.0] * 300, "a.bias": [float(i) for i in range(300)]})
    writer.statuses({"norms": RuleStatus(2, 600, 0, 299)})
    writer.event(Event("notice", "norms", 0, 0, "", "hello"))
    writer.close()
    return path


def test_names_and_aliases_are_those_of_a_session(run_path: Path) -> None:
    with open_run(run_path) as run:
        assert run.params == ("a.weight", "a.bias")
        assert run.latest("tied.a.bias") == run.latest("a.bias") == 299.0
        assert run.history("tied.a.bias", rule="norms")[1] == (1, 1.0)
        with pytest.raises(
            RecordError, match=r"no rule records max of a.bias; recorded: norms: l2"
        ):
            run.history("a.bias", "max")


def test_what_was_planned_and_never_came(tmp_path: Path) -> None:
    RunWriter(tmp_path, meta=meta()).close()
    with (
        open_run(tmp_path) as run,
        pytest.raises(RecordError, match=r"l2 of a.bias has not been recorded yet"),
    ):
        run.latest("a.bias")


def test_ranks_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    writers = [RunWriter(tmp_path, rank=rank, meta=meta()) for rank in (0, 1, 10)]
    for at, writer in zip((3.0, 1.0, 2.0), writers, strict=True):
        now = 1000.0 + at
        add(writer, KEY, 0, values(float(writer.rank), 1.0))
        writer.statuses({"norms": RuleStatus(2, 10, 5 * (writer.rank == 1), writer.rank, ("w",))})
        writer.event(Event("notice", "", 0, writer.rank, "", f"at {at}"))
    add(writers[1], Key("extra", "l2", "step", ("b",)), 4, values(4.0))
    for writer in writers:
        writer.close()
    with open_run(tmp_path) as run:
        assert run.ranks == (0, 1, 10)
        assert fields_of(run, "rank") == [1, 10, 0]
        found = run.status()["norms"]
        assert (found.matched, found.fired, found.last_step, found.warnings) == (2, 30, 10, ("w",))
        assert found.altered == 5
        assert found.changed == pytest.approx(0.5 / 3)
        assert run.history("a.weight") == [(0, 0.0)]
        assert run.history("b") == [(4, 4.0)]
        assert [(one.rank, one.key.rule) for one in run] == [
            (0, "norms"),
            (1, "norms"),
            (1, "extra"),
            (10, "norms"),
        ]
        lowest = [(one.rank, one.key.rule) for one, _ in of_lowest_ranks(run)]
        assert lowest == [(0, "norms"), (1, "extra")]


def test_rows_by_part(run_path: Path) -> None:
    with open_run(run_path) as run:
        (series,) = run
        assert len(series) == 300
        assert series.ends() == (0, 299)
        assert [step for step, *_ in series.stored(290)] == list(range(290, 300))
        assert [step for step, *_ in series.stored(0, 3)] == [0, 1, 2]
        assert series.values_of("a.bias", 298) == [(298, 298.0), (299, 299.0)]


def test_a_run_that_cannot_be_written_any_more_can_be_read(run_path: Path, tmp_path: Path) -> None:
    # What a copy of a finished run has: no log, no lock, and possibly no right to make one.
    for entry in run_path.iterdir():
        entry.chmod(0o444)
    run_path.chmod(0o555)
    with open_run(run_path) as run:
        assert run.latest("a.bias") == 299.0
    run_path.chmod(0o755)


def test_a_run_of_an_earlier_version_is_read(run_path: Path) -> None:
    event = "INSERT INTO events VALUES (1, 0.5, 'trap', 'no-nan', 3, 0, 'a.bias', 'bad')"
    sql(run_path, "DROP TABLE events", EVENTS_WITHOUT_MORE, event)
    with open_run(run_path) as run:
        assert run.latest("a.bias") == 299.0
        (read,) = run.events
    assert read == Event("trap", "no-nan", 3, 0, "a.bias", "bad")


FOREIGN = "its tables are not those of a run"
FORMAT = "not written by this version of gradsurgeon: no JSON with format 3"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, r"cannot be opened as a run: No such file"),
        (
            lambda p: p.rename(p.parent / "old") and p.write_text("x"),
            r"opened as a run: Not a directory",
        ),
        (
            lambda p: (p / "run.json").unlink(),
            r"No such file or directory: run.json; .* once rank 0",
        ),
        (lambda p: (p / "rank-0.db").unlink(), r"no records \(rank-0.db\): were they moved"),
        (
            lambda p: (p / "rank-0.db").write_bytes(b""),
            r"rank-0.db: is damaged: its tables .* yet to be",
        ),
        (lambda p: (p / "rank-0.db").write_bytes(b"x" * 9999), r"rank-0.db: cannot be read: .*not"),
        (lambda p: os.truncate(p / "rank-0.db", 40000), r"rank-0.db: cannot be read: .*malformed"),
        (lambda p: sql(p, "UPDATE series SET id = 1 << 40"), r"cannot be read: .*too large"),
        (lambda p: sql(p, "PRAGMA application_id=7"), FOREIGN),
        (lambda p: sql(p, "PRAGMA user_version=4"), FOREIGN),
        (lambda p: sql(p, "DROP TABLE statuses"), FOREIGN),
        (lambda p: sql(p, "CREATE VIEW v AS SELECT 1"), FOREIGN),
        (
            lambda p: sql(
                p,
                "DROP TABLE rows",
                "CREATE VIEW rows AS WITH RECURSIVE r(id) AS (SELECT 1 UNION ALL SELECT id FROM r) "
                "SELECT id, 1 AS step, x'' AS floats, NULL AS absent FROM r",
            ),
            FOREIGN,
        ),
    ],
)
def test_damaged_and_foreign_directories_say_what_is_wrong(
    run_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(run_path)
    with pytest.raises(RecordError, match=message):
        read_everything(run_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"run.json: is damaged, .*: no JSON with"),
        ("[" * 10**5, r"run.json: is damaged, .*: no JSON with"),
        ("\xff\xfe", r"run.json: is damaged, .*: no JSON with"),
        *[
            (f'{{"format": 3, {entry}}}', r"run.json: is damaged, .*: no JSON with")
            for entry in (
                '"model": 1',
                '"model": {"params": {}}',
                '"model": {"params": [{"name": 1}]}',
                '"model": {"params": [{"name": "a", "aliases": [[]]}]}',
                '"plan": {"rules": [{"id": "norms"}]}',
                '"plan": {"rules": [{"id": "norms", "action": "zero", "params": 1}]}',
                '"roles": {"norms": {"stats": 1}}',
                '"roles": {"norms": []}',
            )
        ],
        ("[]", FORMAT),
        ('{"format": 1}', FORMAT),
        ('{"format": 9}', FORMAT),
    ],
)
def test_a_damaged_or_foreign_description_says_what_is_wrong(
    run_path: Path, text: str, message: str
) -> None:
    (run_path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(RecordError, match=message):
        read_everything(run_path)


@pytest.mark.parametrize(
    "assignment",
    [
        "rows SET floats = x'00'",
        "rows SET floats = 5",
        "rows SET step = 'x'",
        "rows SET absent = 'y'",
        "series SET names = '{}'",
        "series SET names = '[1, 2]'",
        "series SET names = '['",
        "events SET kind = 'x\x1b'",
        "events SET step = 'x'",
        "events SET more = 'x'",
        "events SET more = '[]'",
        'events SET more = \'{"sample_ids": "x"}\'',
        "statuses SET state = '{}'",
        "statuses SET state = '1'",
        """statuses SET state = replace(state, '600', '"x"')""",
    ],
)
def test_values_of_wrong_types_are_refused(run_path: Path, assignment: str) -> None:
    sql(run_path, f"UPDATE {assignment}")
    with pytest.raises(RecordError, match="values of wrong types or sizes"):
        read_everything(run_path)


def sql(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path / "rank-0.db")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def read_everything(path: Path) -> None:
    with open_run(path) as run:
        run.status()
        _ = run.events
        for series in run:
            list(series.stored())
            for name in series.key.names:
                series.values_of(name)
                series.last(name)


def test_columns_are_checked_where_only_they_are_read(run_path: Path) -> None:
    sql(run_path, "UPDATE rows SET floats = x'00000000' WHERE id & 255 = 9")
    with (
        open_run(run_path) as run,
        pytest.raises(RecordError, match="values of wrong types or sizes"),
    ):
        run.history("a.bias")


def test_what_is_no_file_is_not_opened(run_path: Path) -> None:
    os.mkfifo(run_path / "rank-1.db")
    (run_path / "rank-2.db").mkdir()
    (run_path / "rank-03.db").write_text("")
    with open_run(run_path) as run:
        assert run.ranks == (0,)


def test_a_run_that_is_dropped_closes_its_files(tmp_path: Path) -> None:
    write(tmp_path, {"w": [1.0]}).close()
    run = open_run(tmp_path)
    for series in run:  # they know their file, which knows them
        assert len(series) == 1
    (connection,) = (file._connection for file in run._files)
    del run, series
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        connection.execute("SELECT 1")
