"""The SQLite file of one rank: claiming it for a process, making its tables, and testing whether a process writes it."""

import os
import re
import sqlite3
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from urllib.parse import quote

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.store import job, layout

# WAL needs memory that all processes share, and a reader on another machine shares none. These file
# systems do not refuse WAL, but lose or mix up rows.
_NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|fuse\..*|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs"
    r"|smb3|smbfs|virtiofs"
)
_MOUNTS = Path("/proc/self/mounts")
# Without WAL a reader can lock the file for a moment. Training must not wait for it.
_PATIENCE = 0.05


class Claim:
    """The right of this process to write the records of one rank, and the new database for them."""

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        self.folder = Path(path)
        self.database = self.folder / layout.database_name(rank)
        self._lock: sqlite3.Connection | None = None  # a file system may have no locks
        with ExitStack() as undo:
            try:
                if not self.folder.exists():
                    undo.callback(self._remove_folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                if found := _found(self.database, rank):
                    raise RecordError(
                        f"{printable(str(self.folder))}: already holds a run ({found}), and records are never written over "
                        "or mixed up with those of another; pass another directory, or remove this one"
                    )
                # The process that makes the file has the rank. This is atomic, even on network file systems, and
                # cannot go stale.
                os.close(os.open(self.database, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                undo.callback(self._remove_database)
                self._lock = _locked(self.database)
                self.connection = _created(self.database)
            except (sqlite3.Error, OSError) as error:
                raise unwritable(self.folder, error) from None
            self._undo = undo.pop_all()

    def release(self) -> None:
        with suppress(sqlite3.Error):
            self.connection.close()
        self.unlock()

    def undo(self) -> None:
        """Remove everything again: the session did not begin."""
        self.release()
        self._undo.close()

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            with suppress(OSError):
                _lock_file(self.database).unlink()

    def _remove_database(self) -> None:
        self.unlock()
        with suppress(OSError):
            for path in (self.database, *logs(self.database)):
                path.unlink(missing_ok=True)

    def _remove_folder(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()


def unwritable(folder: Path, error: Exception) -> RecordError:
    reason = getattr(error, "strerror", None) or str(error)
    return RecordError(
        f"{printable(str(folder))}: cannot write records there: {printable(reason)}; pass a directory that "
        "can be made and written, if need be on another file system"
    )


def _lock_file(database: Path) -> Path:
    return database.with_suffix(".lock")


def _found(database: Path, rank: int) -> str:
    """Return the file of a run that rank 0 of this run did not begin, empty if there is none."""
    folder = database.parent
    if database.exists():
        now = ", which is being recorded right now" if is_live(database) else ""
        return f"{database.name}{now}"
    if not (folder / layout.RUN_FILE).exists():
        return ""
    # Rank 0 of this very job may have finished: ranks need not wait for each other.
    ours = bool(job.current()) and not job.is_of_another_start(folder)
    if rank and (ours or is_live(folder / layout.database_name(0))):
        return ""
    return f"{layout.RUN_FILE}, whose rank 0 is not recording"


def _locked(database: Path) -> sqlite3.Connection | None:
    """Hold the lock file. The kernel releases it when the process dies, however it dies."""
    lock = connect(_lock_file(database), 0)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error:
        # The file system has no locks. The file of the rank is ours even so.
        lock.close()
        return None
    return lock


def is_live(database: Path) -> bool:
    lock = _lock_file(database)
    if not lock.is_file():
        return False
    try:
        # By SQLite, because closing a plain descriptor would drop a lock of this process.
        with closing(connect(lock, 0, "?mode=ro")) as probe:
            probe.execute("SELECT 1 FROM sqlite_master").fetchall()
    except sqlite3.Error as error:
        return is_busy(error)
    return False


def _created(path: Path) -> sqlite3.Connection:
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
    with ExitStack() as undo:
        connection = connect(path, _PATIENCE)
        undo.callback(connection.close)
        connection.execute(f"PRAGMA page_size={layout.PAGE}")
        (agreed,) = connection.execute(f"PRAGMA journal_mode={mode}").fetchone()
        if agreed != mode:
            raise sqlite3.OperationalError(f"the file system does not support the journal `{mode}`")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("BEGIN")
        connection.execute(f"PRAGMA application_id={layout.APPLICATION}")
        connection.execute(f"PRAGMA user_version={layout.FORMAT}")
        for table in layout.TABLES.values():
            connection.execute(table)
        connection.execute("COMMIT")
        undo.pop_all()
    return connection


def logs(path: Path) -> list[Path]:
    """Return the files that SQLite may keep beside a file that it writes."""
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")]


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
