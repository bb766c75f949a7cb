"""Writing a run directory, in one short transaction per second. If that fails, training goes on."""

import json
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from threading import RLock
from typing import Any

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.store import layout
from gradsurgeon.store.database import Claim, is_busy, unwritable
from gradsurgeon.store.files import Outlet, replacing
from gradsurgeon.store.memory import Key, Measured

_INTERVAL = 1.0
# Without WAL another process can hold the file for long. Then up to this many bytes of rows wait.
_MOST_WAITING = 128 * 2**20


@dataclass(slots=True)
class _Written:
    """One series in the file: its id, and the number and last step of its rows."""

    id: int
    rows: int = 0
    step: int | None = None


class RunWriter(Outlet):
    """Writes the records of one rank into a directory that the ranks share. Rank 0 also writes `run.json`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(_INTERVAL)
        run_json = json.dumps({"format": layout.FORMAT, **(meta or {})}, indent=1)
        self.rank = rank
        self._claim = Claim(path, rank)
        self.path, self._connection = self._claim.folder, self._claim.connection
        try:
            # An earlier run may have left it, and its other files be gone.
            (self.path / layout.captures_name(rank)).unlink(missing_ok=True)
            if rank == 0:
                with replacing(self.path / layout.RUN_FILE, binary=True) as file:
                    file.write(run_json.encode())
        except OSError as error:
            self._claim.undo()
            raise unwritable(self.path, error) from None
        self._identity = self._file_identity()
        self._series: dict[Key, _Written] = {}
        # The rows of the next transaction, by table and by id: a later row replaces an earlier one.
        self._batch: defaultdict[str, dict[object, tuple[Any, ...]]] = defaultdict(dict)
        self._event_ids = count(1)
        self._lock = RLock()

    def take(self, row: Measured) -> None:
        """Take one row. The row that it replaces may be in the file already."""
        key = row.key
        if self.closed:
            return
        with self._lock:
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = _Written(len(self._series) + 1)
                named = series.id, *key[:3], json.dumps(key.names)
                self._batch["series"][series.id] = named
            if not (row.replace and series.step == row.step):
                series.rows += 1
                series.step = row.step
            row_id = layout.row_id(series.id, series.rows - 1)
            bits = layout.pack_absent(row.absent, len(key.names))
            self._batch["rows"][row_id] = (row_id, row.step, row.values, bits)

    def event(self, event: Event) -> None:
        """Write an event, together with the waiting rows."""
        with self._lock:
            if not self.closed:
                number, e = next(self._event_ids), event
                texts = layout.clean(e.name), layout.clean(e.message)
                row = number, time.time(), e.kind, e.rule, e.step, e.rank, *texts
                self._batch["events"][number] = row
                self.commit()

    def statuses(self, statuses: Mapping[str, RuleStatus]) -> None:
        """Take the status of each rule. It is written with the next rows."""
        if self.closed:
            return
        for rule, status in statuses.items():
            self._batch["statuses"][rule] = rule, json.dumps(asdict(status))

    def file(self, name: str, content: bytes) -> None:
        """Write a file beside the records, in place of an earlier one. Raises `OSError`."""
        with self._lock:
            if not self.closed:
                with replacing(self.path / name, binary=True) as file:
                    file.write(content)

    def commit(self) -> None:
        """Write the waiting rows and events. Raises nothing: see `news`."""
        with self._lock:
            if self.closed:
                return
            self._committed = time.monotonic()
            if not self._batch:
                return
            try:
                # A removed file can be written for ever, and nobody will see it.
                if self._file_identity() != self._identity:
                    raise FileNotFoundError("it was removed or replaced")  # noqa: TRY301 # it is what failed
                self._write()
            except Exception as error:  # noqa: BLE001 # nothing that happens here may stop training
                self._failed(error)

    def _write(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for table, rows in self._batch.items():
            marks = ", ".join("?" * len(next(iter(rows.values()))))
            insert = f"INSERT OR REPLACE INTO {table} VALUES ({marks})"  # noqa: S608 # of `layout.TABLES`
            self._connection.executemany(insert, rows.values())
        self._connection.execute("COMMIT")
        self._batch.clear()

    def close(
        self, ended: Mapping[str, Any] | None = None, pending: Mapping[str, int] | None = None
    ) -> None:
        """Write the rest, how the run `ended`, and the updates that last rows wait for. May be called twice."""
        with self._lock:
            if self.closed:
                return
            meta = {
                "closed": repr(time.time()),
                "ended": layout.json_text(dict(ended or {})),
                "pending": layout.json_text(dict(pending or {})),
            }
            self._batch["meta"].update((row[0], row) for row in meta.items())
            self.commit()
            if not self.closed:
                self._ended = True
                # Without a log a finished run is one plain file per rank, readable from anywhere.
                # A reader that is there right now prevents that, and loses nothing.
                with suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA journal_mode=DELETE").fetchall()
                self._claim.release()

    def discard(self) -> None:
        """Remove all files again: the session did not begin."""
        with self._lock:
            if self.closed:
                return
            self._ended = True
            if self.rank == 0:
                with suppress(OSError):
                    (self.path / layout.RUN_FILE).unlink()
            self._claim.undo()

    def _file_identity(self) -> tuple[int, int]:
        stat = self._claim.database.stat()
        return stat.st_dev, stat.st_ino

    def _failed(self, error: Exception) -> None:
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        waiting = sum(len(row[2]) for row in self._batch.get("rows", {}).values())
        if is_busy(error) and waiting < _MOST_WAITING:
            return  # tried again in a second
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self.failed = (
            f"records are no longer written to {printable(str(self._claim.database))}: "
            f"{printable(reason)}; training goes on, and records go on in memory"
        )
        self._note(self.failed)
        self._batch.clear()
        self._claim.release()
