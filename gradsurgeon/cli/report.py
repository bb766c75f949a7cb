"""``gradsurgeon report``: what a run looked like. Never imports torch."""

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from gradsurgeon.cli import fail
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report import from_run, title_of
from gradsurgeon.report.web_page import BEGINNING, web_page
from gradsurgeon.store.files import replacing
from gradsurgeon.store.layout import RUN_FILE
from gradsurgeon.store.run import open_run

# Processes and models of one script make two levels, and people sort their runs into folders.
_DEEPEST = 6


def run(arguments: argparse.Namespace) -> int:
    folders = [Path(run) for run in arguments.runs]
    if arguments.html is not None:
        return _write_page(folders, Path(arguments.html))
    for number, folder in enumerate(folders):
        if number:
            print()
        if (code := _print(folder)) != 0:
            return code
    return 0


def _write_page(folders: Sequence[Path], place: Path) -> int:
    found = [
        one
        for folder in folders
        for one in ([folder] if _is_run(folder) else sorted(_inside(folder)) or [folder])
    ]
    try:
        if reason := _why_kept(place):
            return fail(f"{printable(str(place))}: {reason}")
        with ExitStack() as opened:
            page = web_page([opened.enter_context(open_run(one)) for one in found])
        with replacing(place) as out:
            out.write(page)
    except RecordError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"cannot write {printable(str(place))}: {error.strerror or error}")
    print(
        f"{printable(str(place))}: {count(len(found), 'run')}, {len(page.encode()) / 2**20:.1f} MB; open it in a browser"
    )
    return 0


def _is_run(folder: Path) -> bool:
    return (folder / RUN_FILE).exists()


def _why_kept(place: Path) -> str:
    """Return why the file there must not be written over; empty where there is none, or it may be."""
    if not place.is_file():
        return ""
    with place.open("rb") as file:
        first = file.read(len(BEGINNING))
    if first and first != BEGINNING.encode():
        return "is there already and is no page of `report`; name another one, or remove it first"
    return ""


def _print(folder: Path) -> int:
    inside = sorted(_inside(folder))
    try:
        if is_run := _is_run(folder) or not inside:
            with open_run(folder) as opened:
                print(from_run(opened))
        if inside:
            head = f"{count(len(inside), 'run')} inside {printable(str(folder))}, of other models or processes:"
            print("\n".join([*([""] if is_run else []), head, *_commands(inside)]))
    except RecordError as error:
        return fail(str(error))
    return 0


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the runs in the folders below; a link leads elsewhere and is not followed."""
    for name, below, files in os.walk(folder):
        place = Path(name)
        if RUN_FILE in files and place != folder:
            yield place
        if len(place.parts) - len(folder.parts) == _DEEPEST:
            below.clear()


def _commands(folders: Sequence[Path]) -> Iterator[str]:
    rows = []
    for folder in folders:
        try:
            with open_run(folder) as opened:
                title = title_of(opened)
        except RecordError:
            title = "cannot be read"  # the command says why
        command = f"gradsurgeon report {shlex.quote(str(folder))}"
        rows.append((printable(command), printable(title)))
    yield from grid(rows)
