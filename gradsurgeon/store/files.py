"""Writing a file as a whole, and telling the files that belong to a run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from gradsurgeon.store.layout import RUN_FILE

# SQLite keeps files of its own beside each database, and reads them before it; a part of `run.json`
# is one that is being written.
_OWN = re.compile(rf"\.?{re.escape(RUN_FILE)}(\.\d+)?|rank-\d+\.(lock|db)(-(wal|shm|journal))?")
_DATABASE = re.compile(r"rank-\d+\.db")


def is_of_a_run(path: Path) -> bool:
    """Return whether a path is that of a file that belongs to a run, whether or not it is there yet."""
    real = Path(os.path.realpath(path))
    if not _OWN.fullmatch(real.name):
        return False
    try:
        names = [entry.name for entry in real.parent.iterdir()]
    except OSError:
        return False  # it cannot be written to either
    return any(name == RUN_FILE or _DATABASE.fullmatch(name) for name in names)


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Open a text file that takes the place of another one once it is complete.

    No reader ever sees a part of it, and what was there before stays where writing fails. A link is
    followed: what it leads to is replaced.

    Raises:
        OSError: it cannot be written; nothing has been changed.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{os.getpid()}")
    # A pipe or a device cannot be replaced, and a directory says so by itself.
    if target.exists() and not target.is_file():
        with _text(target, "w") as file:
            yield file
        return
    with _text(part, "x") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                shutil.copymode(target, part)
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _text(path: Path, mode: str) -> IO[str]:
    return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="")
