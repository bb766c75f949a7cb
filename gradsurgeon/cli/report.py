"""``gradsurgeon report``: what a run looked like. Never imports torch."""

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradsurgeon.cli import fail
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report import from_run, title_of
from gradsurgeon.store.layout import RUN_FILE
from gradsurgeon.store.run import open_run

# Processes and models of one script make two levels, and people sort their runs into folders.
_DEEPEST = 6


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.run)
    inside = sorted(runs_inside(folder))
    try:
        if is_run := (folder / RUN_FILE).exists() or not inside:
            with open_run(folder) as opened:
                print(from_run(opened))
        if inside:
            head = f"{count(len(inside), 'run')} inside {printable(arguments.run)}, of other models or processes:"
            print("\n".join([*([""] if is_run else []), head, *_commands(inside)]))
    except RecordError as error:
        return fail(str(error))
    return 0


def runs_inside(folder: Path) -> Iterator[Path]:
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
