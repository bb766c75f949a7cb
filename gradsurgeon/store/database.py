"""Creating the SQLite file of one rank, and writing a batch in one transaction."""

import json
import os
import platform
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from gradsurgeon.events import Event
from gradsurgeon.store import layout
from gradsurgeon.store.memory import Key

# WAL needs memory that all processes share, and a reader on another machine shares none. These file
# systems do not refuse WAL, but lose or mix up rows.
_NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|fuse\..*|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs"
    r"|smb3|smbfs|virtiofs"
)
_MOUNTS = Path("/proc/self/mounts")
# Without WAL a reader can lock the file for a moment. Training must not wait for it.
_PATIENCE = 0.05
# A checkpoint waits for the disk. With pages of 16 kB there are 16 MB of log between two checkpoints.
_CHECKPOINT = 1000

StoredRow = tuple[int, int, bytes, bytes | None]


@dataclass(slots=True)
class WrittenSeries:
    """One series in the file: its id, the number of its rows, and the number of summarised chunks."""

    id: int
    key: Key
    rows: int = 0
    step: int | None = None
    chunks: int = 0


@dataclass(slots=True)
class Batch:
    """The content of one transaction. Rows are stored by id: a later row replaces an earlier one."""

    series: list[WrittenSeries] = field(default_factory=list)
    rows: dict[int, StoredRow] = field(default_factory=dict)
    events: list[tuple[float, Event]] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.series or self.rows or self.events or self.statuses or self.meta)


def create(path: Path, rank: int) -> sqlite3.Connection:
    """Open an empty file for writing and create its tables, with WAL if that is safe."""
    if not _on_network(path):
        # Some file systems refuse WAL, and others accept it and fail at the first write.
        with suppress(sqlite3.Error):
            return _laid_out(path, rank, "wal")
        for log in logs(path):
            log.unlink(missing_ok=True)
        os.truncate(path, 0)
    return _laid_out(path, rank, "truncate")


def _laid_out(path: Path, rank: int, mode: str) -> sqlite3.Connection:
    with ExitStack() as undo:
        connection = connect(path, _PATIENCE)
        undo.callback(connection.close)
        connection.execute(f"PRAGMA page_size={layout.PAGE}")
        (agreed,) = connection.execute(f"PRAGMA journal_mode={mode}").fetchone()
        if agreed != mode:
            raise sqlite3.OperationalError(f"the file system does not support the journal `{mode}`")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT}")
        connection.execute("BEGIN")
        connection.execute(f"PRAGMA application_id={layout.APPLICATION}")
        connection.execute(f"PRAGMA user_version={layout.FORMAT}")
        for table in layout.TABLES.values():
            connection.execute(table)
        noted = {"pid": os.getpid(), "host": platform.node(), "rank": rank}
        _write_meta(connection, {key: str(value) for key, value in noted.items()})
        connection.execute("COMMIT")
        undo.pop_all()
    return connection


def logs(path: Path) -> list[Path]:
    """Return the files that SQLite may keep beside a file that it writes."""
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")]


def _write_meta(connection: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    rows = [(key, layout.clean(value)) for key, value in meta.items()]
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)


def write(connection: sqlite3.Connection, batch: Batch, series: Sequence[WrittenSeries]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    keys = [(one.id, *one.key[:3], json.dumps(one.key.names)) for one in batch.series]
    connection.executemany("INSERT INTO series VALUES (?, ?, ?, ?, ?)", keys)
    connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", batch.rows.values())
    connection.executemany(
        "INSERT INTO events (time, kind, rule, step, rank, name, message) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (time, e.kind, e.rule, e.step, e.rank, layout.clean(e.name), layout.clean(e.message))
            for time, e in batch.events
        ],
    )
    connection.executemany("INSERT OR REPLACE INTO statuses VALUES (?, ?)", batch.statuses.items())
    _write_meta(connection, batch.meta)
    chunks = [_summarise(connection, written) for written in series]
    connection.execute("COMMIT")
    for written, number in zip(series, chunks, strict=True):
        written.chunks = number


def _summarise(connection: sqlite3.Connection, series: WrittenSeries) -> int:
    """Write the summaries of complete chunks. Return the number of summaries."""
    done = series.chunks
    # The last row can still be replaced, so a chunk is complete once a row follows it.
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
    # Read back instead of kept: a chunk of 10,000 tensors is 10 MB per statistic.
    return connection.execute(
        "SELECT step, floats, absent FROM rows WHERE id BETWEEN ? AND ?",
        (first, first + layout.CHUNK - 1),
    ).fetchall()


def is_busy(error: BaseException) -> bool:
    """Return whether another process holds the file for the moment."""
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def connect(path: Path, patience: float, options: str = "") -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(os.fsencode(path.absolute()))}{options}",
        uri=True,
        timeout=patience,
        isolation_level=None,
        check_same_thread=False,
    )


def _on_network(path: Path) -> bool:
    """Return whether a path is on a network file system, as far as this machine lists its mounts."""
    if not _MOUNTS.exists():
        return False
    real = f"{os.path.realpath(path)}/"
    nearest, kind = "", ""
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, escaped, type_, *_ = line.split(" ")
        point = escaped.replace("\\040", " ").rstrip("/")
        # A later mount on the same point hides the earlier one.
        if real.startswith(f"{point}/") and len(point) >= len(nearest):
            nearest, kind = point, type_
    return _NETWORK.fullmatch(kind) is not None
