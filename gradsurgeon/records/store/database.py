"""Opening the SQLite file of one rank, making its tables, and testing whether a process writes it."""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from gradsurgeon.records.store import layout

# WAL needs memory that all processes share, and a reader on another machine shares none. These file
# systems do not refuse WAL, but lose or mix up rows.
_NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|fuse\..*|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs"
    r"|smb3|smbfs|virtiofs"
)
_MOUNTS = Path("/proc/self/mounts")
# Without WAL a reader can lock the file for a moment. Training must not wait for it.
_PATIENCE = 0.05


def lock_file(database: Path) -> Path:
    return database.with_suffix(".lock")


@contextmanager
def locked(database: Path) -> Iterator[None]:
    """Hold the lock file. The kernel releases it when the process dies, however it dies."""
    with closing(connect(lock_file(database), 0)) as lock:
        # A file system may have no locks. The file of the rank is ours even so.
        with suppress(sqlite3.Error):
            lock.execute("BEGIN EXCLUSIVE")
        yield


def is_live(database: Path) -> bool:
    lock = lock_file(database)
    if not lock.is_file():
        return False
    try:
        # By SQLite, because closing a plain descriptor would drop a lock of this process.
        with closing(connect(lock, 0, "?mode=ro")) as probe:
            probe.execute("SELECT 1 FROM sqlite_master").fetchall()
    except sqlite3.Error as error:
        return is_busy(error)
    return False


def created(path: Path) -> sqlite3.Connection:
    """Open an empty file for writing and create its tables, with WAL if that is safe."""
    if not _on_network(path):
        # Some file systems refuse WAL, and others accept it and fail at the first write.
        with suppress(sqlite3.Error):
            return _laid_out(path, "wal")
        for log in logs(path):
            log.unlink(missing_ok=True)
        os.truncate(path, 0)
    return _laid_out(path, "truncate")


def _laid_out(path: Path, mode: str) -> sqlite3.Connection:
    statements = (
        "PRAGMA synchronous=NORMAL",
        "BEGIN",
        f"PRAGMA application_id={layout.APPLICATION}",
        f"PRAGMA user_version={layout.FORMAT}",
        *layout.TABLES.values(),
        "COMMIT",
    )
    with ExitStack() as undo:
        connection = connect(path, _PATIENCE)
        undo.callback(connection.close)
        connection.execute(f"PRAGMA page_size={layout.PAGE}")
        (agreed,) = connection.execute(f"PRAGMA journal_mode={mode}").fetchone()
        if agreed != mode:
            raise sqlite3.OperationalError(f"the file system does not support the journal `{mode}`")
        for statement in statements:
            connection.execute(statement)
        undo.pop_all()
    return connection


def logs(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")]


def is_busy(error: BaseException) -> bool:
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
    # A longer point is nearer, and a later mount on the same point hides the earlier one.
    kinds = {-1: ""}
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, escaped, kind, *_ = line.split(" ")
        point = escaped.replace("\\040", " ").rstrip("/")
        if real.startswith(f"{point}/"):
            kinds[len(point)] = kind
    return _NETWORK.fullmatch(kinds[max(kinds)]) is not None
