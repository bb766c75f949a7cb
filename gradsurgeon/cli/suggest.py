"""``gradsurgeon suggest``: from the records of a healthy run to a rule file. Never imports torch."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from gradsurgeon.cli.options import add_output, add_run, writing
from gradsurgeon.cli.report import runs_inside
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.planning.table import count
from gradsurgeon.store.files import check_replaceable, replacing
from gradsurgeon.store.layout import RUN_FILE
from gradsurgeon.store.run import open_run
from gradsurgeon.suggestion import MARK, suggest


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
    folder, output = Path(arguments.run), arguments.output
    inside = [printable(str(path)) for path in sorted(runs_inside(folder))]
    if inside and not (folder / RUN_FILE).exists():
        raise RecordError(
            f"{printable(str(folder))}: is no run itself; name one of the runs inside: {', '.join(inside)}"
        )
    with writing(output):
        if output is not None:
            check_replaceable(Path(output), _is_suggestion, "suggestion")
        with open_run(folder) as opened:
            suggestion = suggest(opened, arguments.bites)
        if output is None:
            sys.stdout.write(suggestion.text)
            sys.stdout.flush()  # otherwise the summary on stderr could come first
        else:
            with replacing(Path(output)) as file:
                file.write(suggestion.text)
    findings = list(suggestion.findings)
    if inside:
        others = count(len(inside), "run")
        findings.append(f"{others} inside, of other models or processes: {', '.join(inside)}")
    where = printable(output or "standard output")
    for line in (f"{where}: {suggestion.summary}", *map(printable, findings)):
        print(f"gradsurgeon: {line}", file=sys.stderr)
    return int(bool(suggestion.findings))


def _is_suggestion(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()
