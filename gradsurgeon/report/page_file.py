"""Writes the page of runs: for `report --html`, and anew every few seconds for `watch --html`. Never imports torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.report.web_page import BEGINNING, page_data, web_page
from gradsurgeon.store.files import replacing
from gradsurgeon.store.run import open_run


class Written(NamedTuple):
    """A page that was written: how many runs it shows, its size in bytes, and why other runs are not on it."""

    runs: int
    size: int
    problems: list[str]


def write_page(
    runs: Sequence[Path], place: Path, *, reload_seconds: float | None = None
) -> Written:
    """Write the page of some runs, but for those that cannot be read. No reader ever sees a part of it.

    Args:
        runs: run directories.
        place: the file; only a page of ours is written over.
        reload_seconds: after so many seconds the page shows itself anew in a browser; ``None`` for never.

    Raises:
        RecordError: none of the runs can be read, or there is something else at the place, which stays.
        OSError: the place cannot be written.
    """
    if place.is_file():
        with place.open("rb") as file:
            first = file.read(len(BEGINNING))
        if first and first != BEGINNING.encode():
            raise RecordError(
                f"{printable(str(place))}: is there already and is no page of `report`; name another one, or "
                "remove it first"
            )
    readable: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in runs:
        try:
            with open_run(path, partly=True) as run:
                readable.append(page_data(run))
                problems += run.broken.values()
        except RecordError as error:
            problems.append(str(error))
    if not readable:
        raise RecordError("\n".join(problems))
    page = web_page(readable, problems, reload_seconds)
    with replacing(place) as out:
        out.write(page)
    return Written(len(readable), len(page.encode()), problems)
