"""Writing the SQLite file of one rank: how it is opened, and one transaction of rows."""

from __future__ import annotations

import json
import os
import platform
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from gradsurgeon.events import Event
from gradsurgeon.store import layout
from gradsurgeon.store.memory import Key

# WAL needs memory that all processes share, which readers on another machine do not. These file
# systems do not refuse it: they lose or mix up what is written.
_NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|fuse\..*|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs"
    r"|smb3|smbfs|virtiofs"
)
_MOUNTS = Path("/proc/self/mountinfo")
_MOUNT_POINT = 4  # the field of a line
# A reader of a file without WAL can be in the way for a moment; training must not wait for it.
_PATIENCE = 0.05
# Pages of 16 kB: 16 MB of log between two checkpoints, each of which waits for the disk.
_CHECKPOINT = 1000

StoredRow = tuple[int, int, bytes, bytes | None]


@dataclass(slots=True)
class WrittenSeries:
    """One series in the file: its id, how many rows it has, and how many chunks are summarised."""

    id: int
    key: Key
    rows: int = 0
    step: int | None = None
    chunks: int = 0


@dataclass(slots=True)
class Batch:
    """What is to be written in one transaction. Rows are by id, so that a later one replaces."""

    series: list[WrittenSeries] = field(default_factory=list)
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
            uri(path, vfs and f"?vfs={vfs}"),
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
    """Set the mode; return whether SQLite agreed to it."""
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
    _write_meta(connection, noted)
    connection.execute("COMMIT")


def _start_over(path: Path) -> None:
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.truncate(path, 0)


def _write_meta(connection: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    rows = [(key, layout.clean(value)) for key, value in meta.items()]
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)


def write(connection: sqlite3.Connection, batch: Batch, series: Sequence[WrittenSeries]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO series VALUES (?, ?, ?, ?, ?)", map(_series, batch.series))
    connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", batch.rows.values())
    connection.executemany(
        "INSERT INTO events (time, kind, rule, step, rank, name, message) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (_event(time, event) for time, event in batch.events),
    )
    connection.executemany("INSERT OR REPLACE INTO statuses VALUES (?, ?)", batch.statuses.items())
    _write_meta(connection, batch.meta)
    chunks = [_summarise(connection, written) for written in series]
    connection.execute("COMMIT")
    for written, number in zip(series, chunks, strict=True):
        written.chunks = number


def _series(series: WrittenSeries) -> tuple[int, str, str, str, str]:
    key = series.key
    return series.id, key.rule, key.stat, key.point, json.dumps(key.names)


def _event(time: float, event: Event) -> tuple[float, str, str, int, int, str, str]:
    name, message = layout.clean(event.name), layout.clean(event.message)
    return time, event.kind, event.rule, event.step, event.rank, name, message


def _summarise(connection: sqlite3.Connection, series: WrittenSeries) -> int:
    """Write the summaries of chunks that are complete, and return how many there are then."""
    done = series.chunks
    # The last row can still be replaced, so that a chunk is complete once there is a row after it.
    while series.rows > (done + 1) * layout.CHUNK:
        summary = layout.summarise(_chunk(connection, series.id, done), len(series.key.names))
        connection.execute(
            "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)",
            (layout.row_id(series.id, done), *summary),
        )
        done += 1
    return done


def _chunk(connection: sqlite3.Connection, series: int, number: int) -> list[layout.Stored]:
    first = layout.row_id(series, number * layout.CHUNK)
    # Read back rather than kept: a chunk of 10,000 tensors is 10 MB per statistic.
    return connection.execute(
        "SELECT step, floats, absent FROM rows WHERE id BETWEEN ? AND ?",
        (first, first + layout.CHUNK - 1),
    ).fetchall()


def is_busy(error: BaseException) -> bool:
    """Return whether someone else holds the file for the moment."""
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def uri(path: Path, options: str = "") -> str:
    """Return a path as SQLite takes it with options."""
    return f"file:{quote(os.fsencode(path.absolute()))}{options}"


def on_network(path: Path, mounts: str | None = None) -> bool:
    """Return whether an existing path lies on a network file system, where this machine lists its mounts.

    Args:
        path: the path.
        mounts: the list in the form of ``/proc/self/mountinfo``, that of this process by default.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return False
    real = os.path.realpath(path)
    nearest, kind = "", ""
    for line in mounts.splitlines():
        mount, dash, rest = line.partition(" - ")
        fields = mount.split(" ")
        if not dash or len(fields) <= _MOUNT_POINT:
            continue
        point = fields[_MOUNT_POINT].replace("\\040", " ").rstrip("/")
        inside = real == point or real.startswith(f"{point}/")
        # Of two on the same point the later one hides the earlier.
        if inside and len(point) >= len(nearest):
            nearest, kind = point, rest.split(" ")[0]
    return _NETWORK.fullmatch(kind) is not None
