"""Writes the page of runs: for `report --html`, and anew every few seconds for `watch --html`. Never imports torch."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.report.web_page import BEGINNING, web_page
from gradsurgeon.store.files import replacing
from gradsurgeon.store.run import open_run


def write_page(runs: Sequence[Path], place: Path) -> int:
    """Write the page of some runs, and return its size in bytes. No reader ever sees a part of it.

    Raises:
        RecordError: a run cannot be read, or there is something else at the place, which stays.
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
    with ExitStack() as opened:
        page = web_page([opened.enter_context(open_run(run)) for run in runs])
    with replacing(place) as out:
        out.write(page)
    return len(page.encode())
