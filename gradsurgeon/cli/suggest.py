"""``gradsurgeon suggest``: from the records of a healthy run to a rule file. Never imports torch."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from gradsurgeon._libraries import library
from gradsurgeon.cli.options import add_output, add_run, write_output, writing
from gradsurgeon.errors import printable
from gradsurgeon.store.files import begins, check_replaceable
from gradsurgeon.store.run import open_run


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--bites",
        type=_share,
        default=0.01,
        metavar="SHARE",
        help="the share of the steps in which a threshold would have triggered, default: 0.01",
    )
    add_output(parser)
    parser.epilog = (
        "exit codes: 0 every parameter has a threshold, 1 a finding on stderr and in the file needs a look, "
        "such as norms that drift, 2 no rules can be written"
    )


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 < (share := float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)) < 1:
            return share
    raise argparse.ArgumentTypeError(
        f"{text!r} is no share of the steps: a number above 0 and below 1, such as 0.01 for one step in a hundred"
    )


def run(arguments: argparse.Namespace) -> int:
    library("numpy", "report", "suggest")
    from gradsurgeon import suggestion  # noqa: PLC0415 # needs numpy

    output = arguments.output
    if output is not None:
        with writing(output):
            mark = suggestion.MARK.encode()
            check_replaceable(Path(output), lambda path: begins(path, mark), "suggestion")
    with open_run(arguments.run) as opened:
        suggested = suggestion.suggest(opened, arguments.bites)
    write_output(suggested.text, output)
    lines = [f"{printable(output or 'standard output')}: {suggested.summary}"]
    lines += map(printable, suggested.findings)
    for line in lines:
        print(f"gradsurgeon: {line}", file=sys.stderr)
    return int(bool(suggested.findings))
