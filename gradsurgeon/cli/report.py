"""``gradsurgeon report``: what a run looked like. Never imports torch."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import get_args

from gradsurgeon.cli import fail
from gradsurgeon.common._libraries import is_installed
from gradsurgeon.common.events import Event, EventKind
from gradsurgeon.errors import RecordError, did_you_mean, printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.layout import RUN_FILE, json_text, runs_inside
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report import Report, summary
from gradsurgeon.report.report import to_dict
from gradsurgeon.report.rules_and_events import by_kind, event_lines

# A run, empty if that one run was asked for; the number of its ranks; the events that `--fail-on` names.
_Failing = tuple[str, int, Sequence[Event]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run directory, finished or still being written, or a folder of run directories",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write one offline page instead: curves, a map of all norms, traps, rules; several runs are "
        "shown side by side",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "github"),
        default="text",
        help="json is documented and stable, with NaN and Infinity as texts; github annotates a job with the "
        "events that `--fail-on` names; default: text",
    )
    parser.add_argument(
        "--fail-on",
        metavar="KIND,...",
        help="exit with 1 if an event of one of these kinds is in the run, or in a run inside it: "
        f"{', '.join(get_args(EventKind))}",
    )


def run(arguments: argparse.Namespace) -> int:
    texts = [] if arguments.fail_on is None else arguments.fail_on.split(",")
    kinds = list(dict.fromkeys(map(str.strip, texts)))
    if reason := _why_unusable(kinds, arguments):
        return fail(reason)
    folders = [Path(run) for run in arguments.runs]
    try:
        problems: list[str] = []
        if arguments.html is not None:
            problems = _write_page(folders, Path(arguments.html))
        elif arguments.format == "json":
            inside = [*map(str, runs_inside(folders[0]))]
            with open_run(folders[0]) as opened:
                print(json_text({**to_dict(summary(opened)), "inside": inside}, indent=2))
        elif arguments.format == "text":
            # The events alone tell whether a job fails, and need no numpy.
            _print_texts(folders, by_events=bool(kinds) and not is_installed("numpy"))
    except RecordError as error:
        return fail(str(error))
    except OSError as error:
        if arguments.html is None:  # what reads the report has closed the pipe, say
            raise
        return fail(f"cannot write {printable(arguments.html)}: {error.strerror or error}")
    found, unknown = _failing(chain.from_iterable(map(_runs_of, folders)), kinds, folders)
    if arguments.format == "github":
        _print_annotations(found)
    # Otherwise what was found could overtake the report.
    sys.stdout.flush()
    for line in (*dict.fromkeys((*problems, *unknown)), *_summary(found, kinds)):
        print(f"gradsurgeon: {line}", file=sys.stderr)
    # A run that cannot be read counts as a failure.
    return 2 if problems or unknown else int(bool(found))


def _runs_of(folder: Path) -> list[Path]:
    """Return a run and those inside it, or those of a folder; of neither the folder, which then says so."""
    inside = runs_inside(folder)
    return [folder, *inside] if (folder / RUN_FILE).exists() or not inside else inside


def _why_unusable(kinds: Sequence[str], arguments: argparse.Namespace) -> str:
    form, page, known = arguments.format, arguments.html, get_args(EventKind)
    for kind in kinds:
        if kind not in known:
            meant = f" {hint}" if (hint := did_you_mean(kind, known)) else ""
            return f"--fail-on: `{printable(kind)}` is no kind of event;{meant} kinds: {', '.join(known)}"
    if form != "text" and page is not None:
        return f"`--html` writes a page, and `--format {form}` prints: ask for one of them"
    if page is not None and (reason := why_no_page(page)):
        return reason
    if form == "json" and len(arguments.runs) > 1:
        return "`--format json` prints one object, of one run: ask for one at a time"
    if form == "github" and not kinds:
        return "`--format github` shows the events that `--fail-on` names: add it, e.g. `--fail-on trap`"
    return ""


def why_no_page(name: str) -> str:
    """Return why a page cannot be written to a file of this name, nothing if it can."""
    # The path of an empty name is the current directory.
    place = Path(name)
    if name == "-" or (place.exists() and not place.is_file()):
        return f"--html: `{printable(name)}` is no file that a browser can open: name one, such as report.html"
    return ""


def _write_page(folders: Sequence[Path], place: Path) -> list[str]:
    from gradsurgeon.report.web_page import write_page  # noqa: PLC0415 # needs numpy

    runs = [*chain.from_iterable(map(_runs_of, folders))]
    problems = write_page(runs, place)
    shown = count(len(runs) - len(problems), "run")
    print(f"{printable(str(place))}: {shown}; open it in a browser")
    return problems


def _print_texts(folders: Sequence[Path], *, by_events: bool) -> None:
    for folder in folders:
        inside = runs_inside(folder)
        if is_shown := (folder / RUN_FILE).exists() or not inside:
            with open_run(folder) as opened:
                report = summary(opened)
                text = "\n".join([*report.head, *event_lines(report.events)])
                print(text if by_events else report)
        if inside:
            of = f"{count(len(inside), 'run')} inside {printable(str(folder))}"
            print("\n" * is_shown + f"{of}, of other models or processes:")
        for one in inside:
            print(printable(f"  gradsurgeon report {shlex.quote(str(one))}"))
    if by_events:
        text = (
            "norms are not shown, which needs the library numpy: pip install 'gradsurgeon[report]'"
        )
        print(f"gradsurgeon: {text}", file=sys.stderr)


def _failing(
    runs: Iterable[Path], kinds: Sequence[str], asked: Sequence[Path]
) -> tuple[list[_Failing], list[str]]:
    """Return the runs that have events of some kinds, and why it is not known of others."""
    found: list[_Failing] = []
    unknown: list[str] = []
    for place in runs if kinds else ():
        try:
            with open_run(place) as run:
                report = summary(run)
                events = [event for event in report.events if event.kind in kinds]
                if "spike" in kinds:
                    events += _spikes(report, run.ranks[0])
                if events:
                    found.append(("" if [place] == asked else str(place), len(run.ranks), events))
        except RecordError as error:
            unknown.append(str(error))
    return found, unknown


def _spikes(report: Report, rank: int) -> Iterator[Event]:
    for track in report.history.tracks:
        if spike := track.spike:
            text = (
                f"norm {spike.value:.3g}, {spike.times:.3g} times the median of the steps before it"
            )
            yield Event("spike", track.origin.rule, spike.step, rank, track.name, text)


def _summary(found: Sequence[_Failing], kinds: Sequence[str]) -> Iterator[str]:
    for path, _, events in found:
        # An event that several ranks note of a step counts once, as in the report.
        numbers = by_kind(events)
        for kind in kinds:
            if number := numbers[kind]:
                of_kind = [event for event in events if event.kind == kind]
                first = min(of_kind, key=lambda event: event.step)
                where = f"{printable(path)}: " if path else ""
                yield f"{where}{count(number, f'{kind} event')}, first at {_place(first)}"


def _place(event: Event) -> str:
    rule = f"rule {printable(event.rule)}" if event.rule else ""
    return ", ".join(filter(None, (f"step {event.step}", rule, printable(event.name))))


def _print_annotations(found: Sequence[_Failing]) -> None:
    from gradsurgeon.cli.review.formats import annotation  # noqa: PLC0415 # other formats do not need it

    for path, ranks, events in found:
        for event in events:
            on = f", rank {event.rank}" if ranks > 1 else ""
            title = f"{event.kind} at {_place(event)}{on}"
            text = f"{path}: {event.message}" if path else event.message
            print(annotation("error", {"title": title}, text))
