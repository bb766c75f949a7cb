"""Writing a run directory, in one short transaction per second. If that fails, training goes on."""

import json
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple
from pathlib import Path
from threading import RLock
from typing import Any

from gradsurgeon.common.events import Event, RuleStatus
from gradsurgeon.errors import RecordError, printable, reason_of
from gradsurgeon.records.store import layout
from gradsurgeon.records.store.database import created, is_busy, is_live, lock_file, locked, logs
from gradsurgeon.records.store.files import Outlet, replacing
from gradsurgeon.records.store.memory import Key, RecordedRow

# Without WAL another process can hold the file for long. Then so many rows wait.
_MOST_WAITING = 20_000


class RunWriter(Outlet):
    """Writes the records of one rank into a directory that the ranks share. Rank 0 also writes `run.json`."""

    seconds = 1.0

    def __init__(
        self, path: str | os.PathLike[str], *, rank: int = 0, meta: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        run_json = json.dumps({"format": layout.FORMAT, **(meta or {})}, indent=1)
        self.path = Path(path)
        self.rank = rank
        self._database = self.path / layout.database_name(rank)
        with ExitStack() as undo:
            try:
                self._create(undo, run_json)
            except (sqlite3.Error, OSError) as error:
                raise RecordError(
                    f"{printable(str(self.path))}: cannot write records there: {reason_of(error)}; pass a directory "
                    "that can be made and written, if need be on another file system"
                ) from None
            self._undo = undo.pop_all()
        self._file = self._database.stat()
        # The series in the file by key: the id of the last row of each, and its step.
        self._series: dict[Key, tuple[int, int | None]] = {}
        # The rows of the next transaction, by table and by id: a later row replaces an earlier one.
        self._batch = defaultdict[str, dict[object, tuple[Any, ...]]](dict)
        self._lock = RLock()

    def _create(self, undo: ExitStack, run_json: str) -> None:
        """Make the directory and the file of this rank, and note in ``undo`` how to remove them again."""
        if not self.path.exists():
            undo.callback(_remove, self.path.rmdir)
        self.path.mkdir(parents=True, exist_ok=True)
        obstacle = _file_of_other_run(self._database, self.rank)
        if obstacle:
            raise RecordError(
                f"{printable(str(self.path))}: already holds a run ({obstacle}), and records are never written over "
                "or mixed up with those of another; pass another directory, or remove this one"
            )
        # The process that makes the file has the rank. This is atomic, even on network file systems, and
        # cannot go stale.
        os.close(os.open(self._database, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        for file in (self._database, *logs(self._database)):
            undo.callback(_remove, file.unlink)
        self._held = undo.enter_context(ExitStack())
        self._held.callback(_remove, lock_file(self._database).unlink)
        self._held.enter_context(locked(self._database))
        self._connection = created(self._database)
        self._held.callback(_remove, self._connection.close)
        if self.rank == 0:
            run_file = self.path / layout.RUN_FILE
            with replacing(run_file, binary=True) as out:
                out.write(run_json.encode())
            undo.callback(_remove, run_file.unlink)

    def add_row(self, row: RecordedRow) -> None:
        """Take one row. The row that it replaces may be in the file already."""
        key = row.key
        if self.closed:
            return
        with self._lock:
            if key not in self._series:
                number = len(self._series) + 1
                self._series[key] = (layout.row_id(number, -1), None)
                self._batch["series"][number] = (number, *key[:3], json.dumps(key.names))
            row_id, step = self._series[key]
            if not row.replace or step != row.step:
                row_id += 1
                self._series[key] = (row_id, row.step)
            self._batch["rows"][row_id] = (row_id, row.step, row.values, row.absent)

    def event(self, event: Event) -> None:
        *columns, name, message, diagnosis, sample_ids, told_at = astuple(event)
        more = {"diagnosis": diagnosis, "sample_ids": sample_ids, "told_at": told_at}
        with self._lock:
            texts = (layout.clean(name), layout.clean(message))
            # SQLite numbers events. No value of a script's tensors may raise here.
            row = (None, time.time(), *columns, *texts, json.dumps(more, default=str))
            self._batch["events"][object()] = row
            # The clock of `commit` goes on: the statuses of the rules have to be written in time.
            self._write()

    def statuses(self, statuses: Mapping[str, RuleStatus]) -> None:
        """Take the status of each rule. It is written with the next rows."""
        with self._lock:
            for rule, status in statuses.items():
                self._batch["statuses"][rule] = rule, json.dumps(asdict(status))

    def commit(self) -> None:
        """Write the waiting rows and events. Raises nothing: see `news`."""
        self._committed = time.monotonic()
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self.closed:
            self._batch.clear()
        if not self._batch:
            return
        try:
            # A removed file can be written for ever, and nobody will see it.
            if not os.path.samestat(self._database.stat(), self._file):
                raise FileNotFoundError("it was removed or replaced")  # noqa: TRY301 # it is what failed
            self._connection.execute("BEGIN IMMEDIATE")
            for table, rows in self._batch.items():
                marks = ", ".join("?" * len(next(iter(rows.values()))))
                insert = f"INSERT OR REPLACE INTO {table} VALUES ({marks})"  # noqa: S608 # of `layout.TABLES`
                self._connection.executemany(insert, rows.values())
            self._connection.execute("COMMIT")
            self._batch.clear()
        except Exception as error:  # noqa: BLE001 # nothing that happens here may stop training
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            if is_busy(error) and len(self._batch["rows"]) < _MOST_WAITING:
                return  # tried again in a second
            self.failed = (
                f"records are no longer written to {printable(str(self._database))}: "
                f"{reason_of(error)}; training goes on, and records go on in memory"
            )
            self._note(self.failed)
            self._held.close()

    def close(self, left: Mapping[str, object] | None = None) -> None:
        """Write the rest, and what is ``left`` to say of the run. May be called twice."""
        with self._lock:
            if self.closed:
                return
            for key, value in {"closed": time.time(), **(left or {})}.items():
                self._batch["meta"][key] = key, layout.json_text(value)
            self.commit()
            if not self.closed:
                self._ended = True
                # Without a log a finished run is one plain file per rank, readable from anywhere.
                # A reader that is there right now prevents that, and loses nothing.
                with suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA journal_mode=DELETE").fetchall()
                self._held.close()

    def discard(self) -> None:
        """Remove all files again: the session did not begin."""
        with self._lock:
            if not self.closed:
                self._ended = True
                self._undo.close()


def _remove(remove: Callable[[], None]) -> None:
    with suppress(OSError, sqlite3.Error):
        remove()


def _file_of_other_run(database: Path, rank: int) -> str:
    """Return the file of a run that rank 0 of this run did not begin, empty if there is none."""
    folder = database.parent
    if is_live(database):
        return f"{database.name}, which is being recorded right now"
    if database.exists():
        return database.name
    if not (folder / layout.RUN_FILE).exists():
        return ""
    # Rank 0 of this very job may have finished: ranks need not wait for each other.
    ours = bool(layout.job()) and not layout.is_of_another_start(folder)
    if rank and (ours or is_live(folder / layout.database_name(0))):
        return ""
    return f"{layout.RUN_FILE}, whose rank 0 is not recording"
