"""Writing files as a whole, and what all destinations of records have in common."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gradsurgeon.errors import RecordError, printable


@contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file of text, or of bytes, that replaces another once it is complete. If writing fails, the old one stays."""
    # A pipe or a device such as /dev/stdout cannot be replaced. A directory raises by itself.
    at_once = path.exists() and not path.is_file()
    target = Path(os.path.realpath(path))  # through links
    part = target.with_name(f".{target.name}.{os.getpid()}")
    mode = "x"
    if at_once:
        part = path
        mode = "w"
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
    if binary:
        mode += "b"
        options = {}
    with part.open(mode, **options) as file:
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


def check_replaceable(path: Path, what: str, *marks: bytes) -> None:
    """Raise `RecordError` if a file that begins with none of these marks would be written over. An empty file may be."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.read(max(map(len, marks)))
    if begin and not begin.startswith(marks):
        raise RecordError(
            f"{printable(str(path))}: is there already and is no {what}; name another one, or remove it first"
        )


class Outlet:
    """Where records go besides memory. It is due every so many seconds."""

    seconds: float

    def __init__(self) -> None:
        self.failed = ""
        self._ended = False
        # The problems that `news` has not returned yet.
        self._news: list[str] = []
        self._pid = os.getpid()
        self._committed = time.monotonic()

    @property
    def _inherited(self) -> bool:
        # A forked data loader inherits an outlet. Its file and its thread belong to the parent.
        return os.getpid() != self._pid

    @property
    def closed(self) -> bool:
        """Whether nothing is written any more: ended, failed, or in a child process."""
        return self._ended or bool(self.failed) or self._inherited

    def is_due(self) -> bool:
        """Return whether it is time for a commit, or for `news`."""
        if time.monotonic() - self._committed < self.seconds:
            return False
        return bool(self._news) or not self.closed

    def news(self) -> list[str]:
        """Return the problems since the last call."""
        if self._inherited:
            return []
        news = list(self._news)
        del self._news[: len(news)]
        return news

    def _note(self, problem: str) -> None:
        if problem not in self._news:
            self._news.append(problem)
