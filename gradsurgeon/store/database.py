"""Writing the SQLite file of one rank: how it is opened, and one transaction of rows."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradsurgeon.events import Event
from gradsurgeon.store import layout
from gradsurgeon.store.memory import Key
from gradsurgeon.store.places import on_network, uri

# A reader of a file without WAL can be in the way for a moment; training must not wait for it.
_PATIENCE = 0.05
# Pages of 16 kB: 16 MB of log between two checkpoints, each of which waits for the disk.
_CHECKPOINT = 1000

StoredRow = tuple[int, int, bytes, bytes | None]


@dataclass(slots=True)
class Slot:
    """One series in the file: its id, how many rows it has, and how many chunks are summarised."""

    id: int
    key: Key
    rows: int = 0
    step: int | None = None
    chunks: int = 0


@dataclass(slots=True)
class Batch:
    """What is to be written in one transaction. Rows are by id, so that a later one replaces."""

    series: list[Slot] = field(default_factory=list)
    rows: dict[int, StoredRow] = field(default_factory=dict)
    events: list[tuple[float, Event]] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    size: int = 0

    def __bool__(self) -> bool:
        return bool(self.series or self.rows or self.events or self.statuses or self.meta)


def create(path: Path, meta: Mapping[str, str], vfs: str = "") -> sqlite3.Connection:
    """Open an empty file for writing and lay out its tables, with WAL where that is safe.

    Args:
        path: the file.
        meta: what to note in it.
        vfs: SQLite's layer for files, its own choice where empty.

    Raises:
        sqlite3.Error: not even the plain mode works there.
    """
    modes = ["truncate"] if on_network(path) else ["wal", "truncate"]
    for mode in modes:
        connection = sqlite3.connect(
            uri(path, vfs and f"vfs={vfs}"),
            uri=True,
            timeout=_PATIENCE,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            if _prepare(connection, mode):
                # Some file systems let WAL be set and fail with the first write.
                _lay_out(connection, meta)
                return connection
        except sqlite3.Error:
            connection.close()
            if mode == modes[-1]:
                raise
            _start_over(path)
            continue
        connection.close()
    raise sqlite3.OperationalError("the file system supports no journal")


def _prepare(connection: sqlite3.Connection, mode: str) -> bool:
    """Set the mode; tell whether SQLite agreed to it."""
    connection.execute(f"PRAGMA page_size={layout.PAGE}")
    (agreed,) = connection.execute(f"PRAGMA journal_mode={mode}").fetchone()
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT}")
    return str(agreed).lower() == mode


def _lay_out(connection: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    connection.execute("BEGIN")
    connection.execute(f"PRAGMA application_id={layout.APPLICATION}")
    connection.execute(f"PRAGMA user_version={layout.FORMAT}")
    for table in layout.TABLES.values():
        connection.execute(table)
    noted = {"pid": str(os.getpid()), "host": platform.node(), **meta}
    write_meta(connection, noted)
    connection.execute("COMMIT")


def _start_over(path: Path) -> None:
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.truncate(path, 0)


def write_meta(connection: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    """Note texts by key."""
    rows = [(key, layout.clean(value)) for key, value in meta.items()]
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)


def write(connection: sqlite3.Connection, batch: Batch, slots: Sequence[Slot]) -> dict[int, int]:
    """Write a batch in one transaction.

    Returns:
        By series, the number of chunks that are summarised now.
    """
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "INSERT INTO series VALUES (?, ?, ?, ?, ?)", (_series(slot) for slot in batch.series)
    )
    connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", batch.rows.values())
    connection.executemany(
        "INSERT INTO events (time, kind, rule, step, rank, name, message) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (_event(time, event) for time, event in batch.events),
    )
    connection.executemany("INSERT OR REPLACE INTO statuses VALUES (?, ?)", batch.statuses.items())
    write_meta(connection, batch.meta)
    done = {slot.id: _summarise(connection, slot) for slot in slots}
    connection.execute("COMMIT")
    return done


def _series(slot: Slot) -> tuple[int, str, str, str, str]:
    key = slot.key
    return slot.id, key.rule, key.stat, key.point, layout.as_json(key.names)


def _event(time: float, event: Event) -> tuple[float, str, str, int, int, str, str]:
    name, message = layout.clean(event.name), layout.clean(event.message)
    return time, event.kind, event.rule, event.step, event.rank, name, message


def _summarise(connection: sqlite3.Connection, slot: Slot) -> int:
    """Write the summaries of chunks that are complete, and return how many there are then."""
    done = slot.chunks
    # The last row can still be replaced, so that a chunk is complete once there is a row after it.
    while slot.rows > (done + 1) * layout.CHUNK:
        summary = layout.summarise(list(_chunk(connection, slot.id, done)), len(slot.key.names))
        connection.execute(
            "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                layout.row_id(slot.id, done),
                summary.first,
                summary.last,
                *layout.as_blobs(summary),
            ),
        )
        done += 1
    return done


def _chunk(connection: sqlite3.Connection, series: int, number: int) -> Iterator[layout.Stored]:
    first = layout.row_id(series, number * layout.CHUNK)
    # Read back rather than kept: a chunk of 10,000 tensors is 10 MB per statistic.
    yield from connection.execute(
        "SELECT step, floats, absent FROM rows WHERE id BETWEEN ? AND ?",
        (first, first + layout.CHUNK - 1),
    )
