"""Writing a file as a whole."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gradsurgeon.errors import RecordError, printable


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Open a text file that takes the place of another one once it is complete.

    No reader ever sees a part of it, and what was there before stays where writing fails.
    """
    with _opened(path, "", encoding="utf-8", errors="backslashreplace", newline="") as file:
        yield file


@contextmanager
def replacing_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Do the same with a file of bytes."""
    with _opened(path, "b") as file:
        yield file


def check_replaceable(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Raise `RecordError` where a file must not be written over; one that is empty may be."""
    if path.is_file() and path.stat().st_size and not is_ours(path):
        raise RecordError(
            f"{printable(str(path))}: is there already and is no {what}; name another one, or remove it first"
        )


@contextmanager
def _opened(path: Path, kind: str, **options: Any) -> Iterator[IO[Any]]:
    # A pipe or a device, such as /dev/stdout, cannot be replaced, and a directory says so by itself.
    at_once = path.exists() and not path.is_file()
    target = Path(os.path.realpath(path))  # what a link leads to
    part = path if at_once else target.with_name(f".{target.name}.{os.getpid()}")
    mode = "w" if at_once else "x"
    with part.open(mode + kind, **options) as file:
        if at_once:
            yield file
            return
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
