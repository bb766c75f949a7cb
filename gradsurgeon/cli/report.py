"""``gradsurgeon report``: what a run looked like. Never imports torch."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import get_args

from gradsurgeon.cli.gone import refuse
from gradsurgeon.cli.options import add_page, writing
from gradsurgeon.common._libraries import is_installed
from gradsurgeon.common.events import EventKind
from gradsurgeon.errors import GradSurgeonError, RecordError, did_you_mean, printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.layout import RUN_FILE, json_text, runs_inside
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report import summary
from gradsurgeon.report.report import to_dict
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
        "--format",
        choices=("text", "json"),
        type=refuse("report --format github"),
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
    kinds = list(dict.fromkeys(map(str.strip, text.split(","))))
    known = get_args(EventKind)
    for kind in kinds:
        if kind not in known:
            hint = did_you_mean(kind, known)
            meant = f" {hint}" if hint else ""
            raise argparse.ArgumentTypeError(
                f"`{printable(kind)}` is no kind of event;{meant} kinds: {', '.join(known)}"
            )
    return kinds


def run(arguments: argparse.Namespace) -> int:
    folders = [Path(run) for run in arguments.runs]
    kinds = arguments.fail_on
    problems: list[str] = []
    if arguments.html is not None:
        with writing(arguments.html):
            problems = _write_page(folders, Path(arguments.html))
    elif arguments.format == "json":
        _print_json(folders)
    else:
        # The events alone tell whether a job fails, and need no numpy.
        _print_texts(folders, by_events=bool(kinds) and not is_installed("numpy"))
    # Otherwise what was found could overtake the report.
    sys.stdout.flush()
    found: list[str] = []
    if kinds:
        for place in chain.from_iterable(map(_runs_of, folders)):
            where = "" if [place] == folders else f"{printable(str(place))}: "
            try:
                found += [f"{where}{line}" for line in _found(place, kinds)]
            except RecordError as error:
                problems.append(str(error))
    for line in dict.fromkeys((*problems, *found)):
        print(f"gradsurgeon: {line}", file=sys.stderr)
    # A run that cannot be read counts as a failure.
    return 2 if problems else int(bool(found))


def _runs_of(folder: Path) -> list[Path]:
    """Return a run and those inside it, or those of a folder; of neither the folder, which then says so."""
    inside = runs_inside(folder)
    return [folder, *inside] if (folder / RUN_FILE).exists() or not inside else inside


def _write_page(folders: Sequence[Path], place: Path) -> list[str]:
    from gradsurgeon.report.web_page import write_page  # noqa: PLC0415 # needs numpy

    runs = list(chain.from_iterable(map(_runs_of, folders)))
    problems = write_page(runs, place)
    shown = count(len(runs) - len(problems), "run")
    print(f"{printable(str(place))}: {shown}; open it in a browser")
    return problems


def _print_json(folders: Sequence[Path]) -> None:
    if len(folders) > 1:
        raise GradSurgeonError(
            "`--format json` prints one object, of one run: ask for one at a time"
        )
    with open_run(folders[0]) as opened:
        inside = list(map(str, runs_inside(folders[0])))
        print(json_text({**to_dict(summary(opened)), "inside": inside}, indent=2))


def _print_texts(folders: Sequence[Path], *, by_events: bool) -> None:
    for folder in folders:
        inside = runs_inside(folder)
        if (folder / RUN_FILE).exists() or not inside:
            with open_run(folder) as opened:
                report = summary(opened)
                text = "\n".join([*report.head, *event_lines(report.events)])
                print(text if by_events else report)
        if inside:
            of = f"{count(len(inside), 'run')} inside {printable(str(folder))}"
            print(f"{of}, of other models or processes:")
        for one in inside:
            print(printable(f"  gradsurgeon report {shlex.quote(str(one))}"))
    if by_events:
        text = (
            "norms are not shown, which needs the library numpy: pip install 'gradsurgeon[report]'"
        )
        print(f"gradsurgeon: {text}", file=sys.stderr)


def _found(place: Path, kinds: Sequence[str]) -> Iterator[str]:
    """Yield for each kind how many events a run has of it, and where the first is."""
    with open_run(place) as run:
        events = unread(run.recorded()).events
    # An event that several ranks note of a step counts once, as in the report.
    numbers = by_kind(events)
    for kind in kinds:
        of_kind = [event for event in events if event.kind == kind]
        if of_kind:
            first = min(of_kind, key=lambda event: event.step)
            rule = f"rule {printable(first.rule)}" if first.rule else ""
            where = ", ".join(filter(None, (f"step {first.step}", rule, printable(first.name))))
            yield f"{count(numbers[kind], f'{kind} event')}, first at {where}"
