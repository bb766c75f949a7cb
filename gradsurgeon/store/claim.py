"""Claiming a run directory for one rank, and telling whether someone is still writing there."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.store import job
from gradsurgeon.store.database import is_busy, uri
from gradsurgeon.store.layout import RUN_FILE, database_name

_ANOTHER = "pass another directory"


@dataclass(slots=True)
class Claim:
    """The right of this process to write the records of one rank.

    Attributes:
        folder: the run directory.
        database: the file to write, empty so far.
        lock: holds the lock file; ``None`` where the file system has no locks.
        made_folder: the directory was not there before.
    """

    folder: Path
    database: Path
    lock: sqlite3.Connection | None
    made_folder: bool

    def release(self) -> None:
        """Let others see that nobody writes here any more."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None
            _unlink(_lock_file(self.database))

    def undo(self) -> None:
        """Remove the files, and the directory if this claim made it."""
        self.release()
        for suffix in ("", "-wal", "-shm", "-journal"):
            _unlink(self.database.with_name(self.database.name + suffix))
        if self.made_folder:
            with suppress(OSError):
                self.folder.rmdir()


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _lock_file(database: Path) -> Path:
    return database.with_suffix(".lock")


def claim(path: str | os.PathLike[str], rank: int) -> Claim:
    """Make the directory and the empty file of one rank.

    Raises:
        RecordError: the directory cannot be written, or holds a run already.
    """
    folder = Path(path)
    made_folder = _make(folder)
    database = folder / database_name(rank)
    where = printable(str(folder))
    if not database.exists() and _begun_by_others(folder, rank):
        raise RecordError(
            f"{where}: already holds a run ({RUN_FILE}) whose rank 0 is not recording: the records of "
            f"rank {rank} would be mixed up with those of another run; {_ANOTHER}, or remove this one"
        )
    try:
        # Whoever makes the file has the rank: this is atomic, on network file systems as well, and
        # nothing of it can go stale.
        os.close(os.open(database, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        raise RecordError(_taken(where, database)) from None
    except OSError as error:
        if made_folder:
            with suppress(OSError):
                folder.rmdir()
        raise RecordError(_refused(where, error)) from None
    return Claim(folder, database, _locked(database), made_folder)


def _make(folder: Path) -> bool:
    """Make the directory; return whether it was not there before."""
    where = printable(str(folder))
    try:
        if folder.is_dir():
            return False
        folder.mkdir(parents=True)
    except FileExistsError:
        if folder.is_dir():  # another rank was quicker
            return False
        raise RecordError(
            f"{where}: is a file, and records are written into a directory; {_ANOTHER}, or remove the file"
        ) from None
    except (OSError, ValueError) as error:
        raise RecordError(_refused(where, error)) from None
    return True


def _refused(where: str, error: OSError | ValueError) -> str:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"{where}: cannot write records there: {printable(reason)}; pass a directory that can be made and written"


def _begun_by_others(folder: Path, rank: int) -> bool:
    """Return whether the run there is one that rank 0 of this one did not begin."""
    if not (folder / RUN_FILE).exists():
        return False
    if rank == 0:
        return True
    # Rank 0 of this very job may have finished: nothing says that ranks wait for each other.
    ours = bool(job.current()) and not job.is_of_another_start(folder)
    return not (ours or is_live(folder / database_name(0)))


def _taken(where: str, database: Path) -> str:
    if is_live(database):
        return (
            f"{where}: a run is being recorded there right now ({database.name} is locked): two would mix up "
            f"their rows; {_ANOTHER}, one for each run"
        )
    return (
        f"{where}: already holds the records of a run ({database.name}), which are never written over; "
        f"{_ANOTHER}, or remove this one"
    )


def _locked(database: Path) -> sqlite3.Connection | None:
    """Hold the lock file. The kernel lets go of it when the process dies, however it dies."""
    lock = sqlite3.connect(
        _lock_file(database), timeout=0, isolation_level=None, check_same_thread=False
    )
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error:
        # A file system without locks. The file of the rank is ours all the same.
        lock.close()
        return None
    return lock


def is_live(database: Path) -> bool:
    """Return whether a process is writing the records of one rank."""
    lock = _lock_file(database)
    if not lock.is_file():
        return False
    try:
        # Through SQLite, because closing a plain descriptor would drop a lock of this process.
        with closing(sqlite3.connect(uri(lock, "?mode=ro"), uri=True, timeout=0)) as probe:
            probe.execute("SELECT 1 FROM sqlite_master").fetchall()
    except sqlite3.Error as error:
        return is_busy(error)
    return False
