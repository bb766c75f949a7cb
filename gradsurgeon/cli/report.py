"""``gradsurgeon report``: what a run looked like. Never imports torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gradsurgeon.cli import fail
from gradsurgeon.errors import RecordError
from gradsurgeon.report import from_run, needs_ascii
from gradsurgeon.store.run import open_run

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 2 where there is no run that can be read."""
    try:
        with open_run(arguments.run) as found:
            report = from_run(found)
            plain = arguments.ascii or needs_ascii(sys.stdout.encoding)
            print(report.text(ascii_only=plain))
    except RecordError as error:
        return fail(str(error))
    return 0
