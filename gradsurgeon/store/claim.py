"""Claiming a run directory for one rank, and testing whether a process still writes there."""

import os
import sqlite3
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.store import job
from gradsurgeon.store.database import connect, create, is_busy, logs
from gradsurgeon.store.layout import RUN_FILE, database_name


class Claim:
    """The right of this process to write the records of one rank, and the new database for them.

    Raises:
        RecordError: the directory already holds a run, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        self.folder = Path(path)
        self.database = self.folder / database_name(rank)
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
                self.connection = create(self.database)
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
    if not (folder / RUN_FILE).exists():
        return ""
    # Rank 0 of this very job may have finished: ranks need not wait for each other.
    ours = bool(job.current()) and not job.is_of_another_start(folder)
    if rank and (ours or is_live(folder / database_name(0))):
        return ""
    return f"{RUN_FILE}, whose rank 0 is not recording"


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
