"""``gradsurgeon report``: what a run looked like. Never imports torch."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from gradsurgeon.cli import fail
from gradsurgeon.errors import RecordError, did_you_mean, printable
from gradsurgeon.events import Event, EventKind
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report import from_run, title_of
from gradsurgeon.report.page_file import write_page
from gradsurgeon.report.plain import to_dict
from gradsurgeon.report.rules_and_events import by_kind
from gradsurgeon.store.json_text import json_text
from gradsurgeon.store.layout import RUN_FILE
from gradsurgeon.store.run import open_run

# Processes and models of one script make two levels, and people sort their runs into folders.
_DEEPEST = 6


class _Found(NamedTuple):
    """The events of one run that `--fail-on` names; the path is empty where that one run was asked for."""

    path: str
    ranks: int
    events: Sequence[Event]


def run(arguments: argparse.Namespace) -> int:
    kinds = [] if arguments.fail_on is None else _kinds(arguments.fail_on)
    if reason := _why_unusable(kinds, arguments):
        return fail(reason)
    folders = [Path(run) for run in arguments.runs]
    found: list[_Found] = []
    try:
        if arguments.html is not None:
            _write_page(folders, Path(arguments.html))
        for folder in folders:
            inside = sorted(runs_inside(folder))
            is_run = _is_run(folder) or not inside
            if arguments.html is None:
                _print(folder, inside, arguments.format, is_run=is_run)
            found += _found([*([folder] if is_run else []), *inside], folders, kinds)
    except RecordError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"cannot write {printable(arguments.html)}: {error.strerror or error}")
    if arguments.format == "github":
        _print_annotations(found)
    # Otherwise what was found could overtake the report.
    sys.stdout.flush()
    for line in _summary(found, kinds):
        print(f"gradsurgeon: {line}", file=sys.stderr)
    return int(bool(found))


def _is_run(folder: Path) -> bool:
    return (folder / RUN_FILE).exists()


def _write_page(folders: Sequence[Path], place: Path) -> None:
    runs = [
        run
        for folder in folders
        for run in ([folder] if _is_run(folder) else sorted(runs_inside(folder)) or [folder])
    ]
    size = write_page(runs, place) / 2**20
    print(
        f"{printable(str(place))}: {count(len(runs), 'run')}, {size:.1f} MB; open it in a browser"
    )


def _print(folder: Path, inside: Sequence[Path], form: str, *, is_run: bool) -> None:
    if form == "text":
        _print_text(folder, inside, is_run=is_run)
    elif form == "json":
        _print_json(folder, inside, is_run=is_run)


def _kinds(text: str) -> list[str]:
    return list(dict.fromkeys(kind.strip() for kind in text.split(",")))


def _why_unusable(kinds: Sequence[str], arguments: argparse.Namespace) -> str:
    form = arguments.format
    if form != "text" and arguments.html is not None:
        return f"`--html` writes a page, and `--format {form}` prints: ask for one of them"
    if form == "json" and len(arguments.runs) > 1:
        return "`--format json` prints one object, of one run: ask for one at a time"
    known = get_args(EventKind)
    for kind in kinds:
        if kind not in known:
            meant = f" {hint}" if (hint := did_you_mean(kind, known)) else ""
            return f"--fail-on: `{printable(kind)}` is no kind of event;{meant} kinds: {', '.join(known)}"
    if form == "github" and not kinds:
        return "`--format github` shows the events that `--fail-on` names: add it, e.g. `--fail-on trap`"
    return ""


def _print_text(folder: Path, inside: Sequence[Path], *, is_run: bool) -> None:
    if is_run:
        with open_run(folder) as opened:
            print(from_run(opened))
    if inside:
        head = f"{count(len(inside), 'run')} inside {printable(str(folder))}, of other models or processes:"
        print("\n".join([*([""] if is_run else []), head, *_commands(inside)]))


def _print_json(folder: Path, inside: Sequence[Path], *, is_run: bool) -> None:
    paths = [str(path) for path in inside]
    if not is_run:
        raise RecordError(
            f"{printable(str(folder))}: is no run itself; name one of the runs inside: "
            f"{printable(', '.join(paths))}"
        )
    with open_run(folder) as opened:
        print(json_text({**to_dict(from_run(opened)), "inside": paths}, indent=2))


def _found(places: Sequence[Path], asked: Sequence[Path], kinds: Sequence[str]) -> Iterator[_Found]:
    """Yield what runs have of some kinds of events, for those that have any."""
    for place in places if kinds else ():
        with open_run(place) as opened:
            events = [event for event in opened.events if event.kind in kinds]
            ranks = len(opened.ranks)
        if events:
            yield _Found("" if [place] == [*asked] else str(place), ranks, events)


def _summary(found: Sequence[_Found], kinds: Sequence[str]) -> Iterator[str]:
    for path, _, events in found:
        # What several ranks note of a step counts once, as in the report.
        numbers = by_kind(events)
        for kind in kinds:
            if number := numbers[kind]:
                first = min((event for event in events if event.kind == kind), key=_step)
                where = f"{printable(path)}: " if path else ""
                yield f"{where}{count(number, f'{kind} event')}, first at {_place(first)}"


def _step(event: Event) -> int:
    return event.step


def _place(event: Event) -> str:
    rule = f"rule {printable(event.rule)}" if event.rule else ""
    return ", ".join(filter(None, (f"step {event.step}", rule, printable(event.name))))


def _print_annotations(found: Sequence[_Found]) -> None:
    from gradsurgeon.review.github import annotation  # noqa: PLC0415 # the others do not need it

    for path, ranks, events in found:
        for event in events:
            on = f", rank {event.rank}" if ranks > 1 else ""
            title = f"{event.kind} at {_place(event)}{on}"
            text = f"{path}: {event.message}" if path else event.message
            print(annotation("error", {"title": title}, text))


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
