"""``gradsurgeon report``: what a run looked like. Never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gradsurgeon.cli import fail
from gradsurgeon.errors import RecordError
from gradsurgeon.report import from_run, needs_ascii
from gradsurgeon.store.layout import RUN_FILE
from gradsurgeon.store.run import open_run

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 2 where there is no run that can be read."""
    plain = arguments.ascii or needs_ascii(sys.stdout.encoding)
    try:
        for number, folder in enumerate(_runs(arguments.run)):
            with open_run(folder) as found:
                text = from_run(found).text(ascii_only=plain)
            print(f"\n{text}" if number else text)
    except RecordError as error:
        return fail(str(error))
    return 0


def _runs(path: str) -> list[str | Path]:
    """Return a run directory and those inside it: a script that trains several models has several."""
    return [path, *sorted(file.parent for file in Path(path).glob(f"*/{RUN_FILE}"))]
