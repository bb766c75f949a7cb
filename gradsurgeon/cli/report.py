"""``gradsurgeon report``: what a run looked like. Never imports torch."""

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import get_args

from gradsurgeon.cli.options import add_page, writing
from gradsurgeon.common._libraries import is_installed
from gradsurgeon.common.events import EventKind
from gradsurgeon.errors import GradSurgeonError, RecordError, did_you_mean, printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.layout import RUN_FILE, json_text, runs_inside
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report import summary
from gradsurgeon.report.json_form import to_dict
from gradsurgeon.report.rules_and_events import by_kind, event_lines
from gradsurgeon.report.sources import unread


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run directory, finished or still being written, or a folder of run directories",
    )
    form = parser.add_mutually_exclusive_group()
    add_page(
        form,
        what="write one offline page instead: curves, a map of all norms, traps, rules; several runs are "
        "shown side by side",
    )
    form.add_argument(
        "--norms",
        metavar="FILE",
        help="write the norms of one run as a small file, at most 1 MB, for `plan --on FILE` and `diff --on FILE`; of a long "
        "run some steps stand for others",
    )
    form.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="json is documented and stable, of one run, with NaN and Infinity as texts; default: text",
    )
    parser.add_argument(
        "--fail-on",
        type=_kinds,
        default=(),
        metavar="KIND,...",
        help="exit with 1 if an event of one of these kinds is in the run, or in a run inside it: "
        f"{', '.join(get_args(EventKind))}",
    )


def _kinds(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    kinds = list(dict.fromkeys(words))
    known = get_args(EventKind)
    for kind in kinds:
        if kind not in known:
            hint = f"{did_you_mean(kind, known)} kinds: {', '.join(known)}"
            raise argparse.ArgumentTypeError(
                f"`{printable(kind)}` is no kind of event; {hint.lstrip()}"
            )
    return kinds


def run(arguments: argparse.Namespace) -> int:
    folders = list(map(Path, arguments.runs))
    kinds = arguments.fail_on
    problems: list[str] = []
    if arguments.html is not None:
        from gradsurgeon.report.web_page import write_page  # noqa: PLC0415 # needs numpy

        with writing(arguments.html):
            runs = _runs_of(folders)
            problems = write_page(runs, Path(arguments.html))
        shown = count(len(runs) - len(problems), "run")
        print(f"{printable(arguments.html)}: {shown}; open it in a browser")
    elif arguments.norms is not None:
        _write_norms(folders, Path(arguments.norms))
    elif arguments.format == "json":
        _print_json(folders)
    else:
        # The events alone tell whether a job fails, and need no numpy.
        _print_texts(folders, only_events=bool(kinds) and not is_installed("numpy"))
    # Otherwise the lines below could overtake the report.
    sys.stdout.flush()
    events: list[str] = []
    if kinds:
        for path in _runs_of(folders):
            title = "" if [path] == folders else f"{printable(str(path))}: "
            try:
                events += _event_counts(path, kinds, title)
            except RecordError as error:
                problems.append(str(error))
    for line in dict.fromkeys((*problems, *events)):
        print(f"gradsurgeon: {line}", file=sys.stderr)
    # A run that cannot be read counts as a failure.
    if problems:
        return 2
    return int(bool(events))


def _runs_of(folders: Sequence[Path]) -> list[Path]:
    """Return each run and the runs inside it; a folder without a run is itself returned, and opening it reports that."""
    runs = []
    for folder in folders:
        inside = runs_inside(folder)
        if (folder / RUN_FILE).exists() or not inside:
            runs.append(folder)
        runs += inside
    # A run may be named beside the run that it is in.
    return list(dict.fromkeys(runs))


def _write_norms(folders: Sequence[Path], path: Path) -> None:
    from gradsurgeon.report.evidence import norms_file, run_norms  # noqa: PLC0415 # needs numpy

    if len(folders) > 1:
        raise GradSurgeonError("`--norms` writes the norms of one run: ask for one at a time")
    with writing(str(path)):
        is_rounded = norms_file.write(run_norms.read(folders[0]), path)
    text = f"{printable(str(path))}: the norms of {printable(str(folders[0]))}"
    if is_rounded:
        text += "; some steps stand for others, so counts are rounded"
    print(text)


def _print_json(folders: Sequence[Path]) -> None:
    if len(folders) > 1:
        raise GradSurgeonError(
            "`--format json` prints one object, of one run: ask for one at a time"
        )
    with open_run(folders[0]) as opened:
        inside = list(map(str, runs_inside(folders[0])))
        print(json_text({**to_dict(summary(opened)), "inside": inside}, indent=2))


def _print_texts(folders: Sequence[Path], *, only_events: bool) -> None:
    for number, folder in enumerate(folders):
        shown = printable(str(folder))
        if len(folders) > 1:
            gap = "\n" if number else ""
            print(f"{gap}{shown}:")
        inside = runs_inside(folder)
        _print_first_to_trip(folder, inside)
        if folder in _runs_of([folder]):
            with open_run(folder) as opened:
                report = summary(opened)
                if only_events:
                    print(*report.head, *event_lines(report.events), sep="\n")
                else:
                    print(report)
        if inside:
            print(f"{count(len(inside), 'run')} inside {shown}, of other models or processes:")
        for run in inside:
            print(printable(f"  gradsurgeon report {shlex.quote(str(run))}"))
    if only_events:
        print(
            "gradsurgeon: norms are not shown, which needs the library numpy: pip install 'gradsurgeon[report]'",
            file=sys.stderr,
        )


def _print_first_to_trip(folder: Path, inside: Sequence[Path]) -> None:
    """Print what was found in a further model of a script, if a rule tripped there before one did in the first model."""
    earliest = math.inf
    text = ""
    for path in (folder, *inside):
        # A report of a damaged run says what is wrong. Runs deeper inside are of other processes.
        with suppress(RecordError), open_run(path) as run:
            time = run.first_trip
            if path.parent not in (folder, folder.parent) or time is None or time >= earliest:
                continue
            earliest = time
            text = ""
            if path != folder:
                text = f"{path.name} tripped first: {unread(run.recorded()).outcome.diagnosis}"
    if text:
        print(printable(text))


def _event_counts(path: Path, kinds: Sequence[str], title: str) -> Iterator[str]:
    """Yield, for each kind that the run has, the number of its events and the place of the first."""
    with open_run(path) as run:
        events = unread(run.recorded()).events
    # An event that several ranks note of a step counts once, as in the report.
    numbers = by_kind(events)
    for kind in kinds:
        of_kind = [event for event in events if event.kind == kind]
        if not of_kind:
            continue
        first = min(of_kind, key=attrgetter("step"))
        number = count(numbers[kind], f"{kind} event")
        text = f"{title}{number}, first at step {first.step}"
        if first.rule:
            text += f", rule {printable(first.rule)}"
        if first.name:
            text += f", {printable(first.name)}"
        yield text
