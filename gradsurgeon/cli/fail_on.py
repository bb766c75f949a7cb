"""``gradsurgeon report --fail-on``: which runs have had events that a CI job must not pass over. Never imports torch."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from gradsurgeon.errors import RecordError, did_you_mean, printable
from gradsurgeon.events import Event, EventKind
from gradsurgeon.planning.table import count
from gradsurgeon.report import Report, from_run
from gradsurgeon.report.rules_and_events import by_kind
from gradsurgeon.store.run import open_run


class Failing(NamedTuple):
    """The events of one run that `--fail-on` names; the path is empty where that one run was asked for."""

    path: str
    ranks: int
    events: Sequence[Event]


def kinds_of(text: str) -> list[str]:
    return list(dict.fromkeys(kind.strip() for kind in text.split(",")))


def why_unknown(kinds: Sequence[str]) -> str:
    known = get_args(EventKind)
    for kind in kinds:
        if kind not in known:
            meant = f" {hint}" if (hint := did_you_mean(kind, known)) else ""
            return f"--fail-on: `{printable(kind)}` is no kind of event;{meant} kinds: {', '.join(known)}"
    return ""


def failing(
    runs: Iterable[Path], kinds: Sequence[str], asked: Sequence[Path]
) -> tuple[list[Failing], list[str]]:
    """Return the runs that have events of some kinds, and why it is not known of others.

    Args:
        runs: the runs, each read only if there are kinds.
        kinds: of events.
        asked: what the user named.
    """
    found: list[Failing] = []
    unknown: list[str] = []
    for place in runs if kinds else ():
        try:
            with open_run(place) as run:
                report = from_run(run)
                events = [event for event in report.events if event.kind in kinds]
                if "spike" in kinds:
                    events += _spikes(report, run.ranks[0])
                if events:
                    path = "" if [place] == asked else str(place)
                    found.append(Failing(path, len(run.ranks), events))
        except RecordError as error:
            unknown.append(str(error))
    return found, unknown


def _spikes(report: Report, rank: int) -> Iterator[Event]:
    """Yield the largest spike of each tensor whose norms have one, as the report calls them out."""
    for track in report.history.tracks:
        if spike := track.spike:
            text = (
                f"norm {spike.value:.3g}, {spike.times:.3g} times the median of the steps before it"
            )
            yield Event("spike", track.source.rule, spike.step, rank, track.name, text)


def summary(found: Sequence[Failing], kinds: Sequence[str]) -> Iterator[str]:
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


def print_annotations(found: Sequence[Failing]) -> None:
    from gradsurgeon.review.formats import annotation  # noqa: PLC0415 # other formats do not need it

    for path, ranks, events in found:
        for event in events:
            on = f", rank {event.rank}" if ranks > 1 else ""
            title = f"{event.kind} at {_place(event)}{on}"
            text = f"{path}: {event.message}" if path else event.message
            print(annotation("error", {"title": title}, text))
