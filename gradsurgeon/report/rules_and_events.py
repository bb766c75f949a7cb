"""What each rule did, and what happened."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, EventKind, RuleStatus
from gradsurgeon.planning.table import count, grid

_EVENTS = 20
_CHANGING_NOTHING = ("observe", "capture")


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What the report has to know of a rule: its action and role, and whose l2 norms it records."""

    action: str
    role: str = "edit"
    logged: tuple[str, ...] = ()


def rule_lines(
    infos: Mapping[str, RuleInfo],
    statuses: Mapping[str, RuleStatus],
    events: Sequence[Event] = (),
) -> Iterator[str]:
    """Yield what each rule did."""
    if not statuses:
        return
    rows = [("rule", "action", "matched", "fired", "changed", "last step", "")]
    for rule, status in statuses.items():
        info = infos.get(rule, RuleInfo("?"))
        trips = [e for e in events if (e.kind, e.rule) == ("trap", rule)]
        # A trap only reads gradients, and its trips are counted in the remark.
        is_trap = info.role == "trap"
        rows.append(
            (
                printable(rule),
                printable(info.action),
                f"{status.matched:,}",
                "-" if is_trap else f"{status.fired:,}",
                "-"
                if is_trap or info.role in _CHANGING_NOTHING
                else f"{100 * status.changed:.3g}%",
                "-" if status.last_step is None else str(status.last_step),
                _remark(info, status, trips),
            )
        )
    yield f"rules ({len(statuses)})"
    yield from grid(rows, right=frozenset({2, 3, 4, 5}))


def _remark(info: RuleInfo, status: RuleStatus, trips: Sequence[Event]) -> str:
    if not status.fired:
        return "NEVER LOOKED" if info.role == "trap" else "NEVER FIRED"
    if info.role == "trap":
        ranks = sorted({event.rank for event in trips}) or [0]
        # Each rank counts its own; and events are bounded, which the count is not.
        counted = math.ceil(round(status.changed * status.fired) / len(ranks))
        tripped = max(counted, len({event.step for event in trips}))
        on = f" on ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else ""
        told = f"tripped in {count(tripped, 'step')}{on}" if tripped else "never tripped"
        return f"looked {count(status.fired, 'time')}, {told}"
    return "changed nothing" if info.role == "edit" and not status.changed else ""


def by_kind(events: Iterable[Event]) -> Counter[str]:
    """Return how many events there are of each kind; what several ranks note of a step counts once."""
    per_rank = Counter((event.kind, event.rule, event.step, event.rank) for event in events)
    most: dict[tuple[EventKind, str, int], int] = {}
    for (kind, rule, step, _), number in per_rank.items():
        most[kind, rule, step] = max(number, most.get((kind, rule, step), 0))
    kinds: Counter[str] = Counter()
    for (kind, _, _), number in most.items():
        kinds[kind] += number
    return kinds


def event_lines(events: Sequence[Event]) -> Iterator[str]:
    """Yield the events in order of time, repeated ones folded into their first."""
    if not events:
        return
    groups: dict[tuple[str, ...], list[Event]] = {}
    for event in events:
        # Notices of no rule in particular have only their wording to be told apart by, but for the
        # numbers in it; the second line of a trap says what was done, so "giving up" stands alone.
        wording = re.sub(r"\d[\d,.]*", "#", "".join(event.message.split("\n", 2)[:2]))
        groups.setdefault((event.kind, event.rule, event.name, wording), []).append(event)
    folded = list(groups.values())
    # The beginning tells what went wrong first, the end what stopped the run.
    early, late = folded[: _EVENTS // 2], folded[_EVENTS // 2 :]
    left_out = late[: -(_EVENTS // 2)]
    yield f"events ({by_kind(events).total():,})"
    for group in early:
        yield from _entry(group)
    if left_out:
        yield f"  ... and {sum(by_kind(group).total() for group in left_out):,} more"
    for group in late[len(left_out) :]:
        yield from _entry(group)


def _entry(group: Sequence[Event]) -> Iterator[str]:
    first = group[0]
    steps = [event.step for event in group]
    head = f"  step {first.step}  {first.kind}"
    head += "".join(f"  {printable(text)}" for text in (first.rule, first.name) if text)
    ranks = sorted({event.rank for event in group})
    if ranks != [0]:
        head += f"  rank {', '.join(map(str, ranks))}"
    number = by_kind(group).total()
    if number > 1:
        head += f"  x{number:,}, steps {min(steps)}..{max(steps)}"
    yield head
    for line in first.message.split("\n"):
        yield f"      {printable(line)}".rstrip()
