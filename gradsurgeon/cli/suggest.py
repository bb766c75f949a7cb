"""``gradsurgeon suggest``: from the records of a healthy run to a rule file. Never imports torch."""

import argparse
import sys
from pathlib import Path

from gradsurgeon.cli import fail
from gradsurgeon.cli.report import runs_inside
from gradsurgeon.errors import GradSurgeonError, RecordError, printable
from gradsurgeon.planning.table import count
from gradsurgeon.store.files import check_replaceable, replacing
from gradsurgeon.store.layout import RUN_FILE
from gradsurgeon.store.run import open_run
from gradsurgeon.suggestion import MARK, Suggestion, suggest


def run(arguments: argparse.Namespace) -> int:
    folder, output = Path(arguments.run), arguments.output
    inside = [printable(str(path)) for path in sorted(runs_inside(folder))]
    try:
        if inside and not (folder / RUN_FILE).exists():
            raise RecordError(
                f"{printable(str(folder))}: is no run itself; name one of the runs inside: {', '.join(inside)}"
            )
        if output is not None:
            check_replaceable(Path(output), _is_suggestion, "suggestion")
        with open_run(folder) as opened:
            suggestion = suggest(opened, arguments.bites)
        _write(suggestion, output)
    except GradSurgeonError as error:
        return fail(str(error))
    except OSError as error:
        if output is None:  # what reads the rules has closed the pipe, say
            raise
        return fail(f"cannot write {printable(output)}: {error.strerror or error}")
    findings = suggestion.findings
    if inside:
        others = count(len(inside), "run")
        findings = [
            *findings,
            f"{others} inside, of other models or processes: {', '.join(inside)}",
        ]
    where = printable(output or "standard output")
    for line in (f"{where}: {suggestion.summary}", *map(printable, findings)):
        print(f"gradsurgeon: {line}", file=sys.stderr)
    return int(bool(suggestion.findings))


def _is_suggestion(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def _write(suggestion: Suggestion, output: str | None) -> None:
    if output is None:
        sys.stdout.write(suggestion.text)
        sys.stdout.flush()  # otherwise the summary could overtake what it sums up
    else:
        with replacing(Path(output)) as file:
            file.write(suggestion.text)
