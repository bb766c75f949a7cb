"""Writing a file as a whole."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gradsurgeon.errors import RecordError, printable


@contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file of text, or of bytes, that replaces another file once it is complete.

    No reader ever sees a part of it. If writing fails, the old file stays.
    """
    # A pipe or a device such as /dev/stdout cannot be replaced. A directory raises by itself.
    at_once = path.exists() and not path.is_file()
    target = Path(os.path.realpath(path))  # through links
    part = path if at_once else target.with_name(f".{target.name}.{os.getpid()}")
    mode = "w" if at_once else "x"
    text: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
    with part.open(mode + "b" * binary, **({} if binary else text)) as file:
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


def check_replaceable(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Raise `RecordError` if a file must not be written over. An empty file may be."""
    if path.is_file() and path.stat().st_size and not is_ours(path):
        raise RecordError(
            f"{printable(str(path))}: is there already and is no {what}; name another one, or remove it first"
        )


def begins(path: Path, *marks: bytes) -> bool:
    """Return whether a file begins with one of some marks."""
    with path.open("rb") as file:
        return file.read(max(map(len, marks))).startswith(marks)
