"""What each rule did, and what happened."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from gradsurgeon.common._grouping import grouped
from gradsurgeon.common.events import Event, RuleStatus, is_trip
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.tables import Table

STAT = "l2"
GRADIENT = "gradient"
# The norm of all gradients of a rule together.
WHOLE = "whole norm"
COSINE = "cosine"
RATIO = "ratio"
WEIGHT = "weight"
DISTANCE = "distance"
# Rules on weights measure these; statistics of updates are shown beside norms.
WEIGHTS = "weight"
UPDATES = "update"
OF_UPDATES = {"ratio": "update over weight", "moved": "share of elements moved"}
OF_WEIGHTS = frozenset({WEIGHTS, UPDATES, *OF_UPDATES.values()})
# The tensors of rules on the state of an optimizer begin so.
STATE = "state."
LOSS_STATS = frozenset({COSINE, RATIO, WEIGHT, DISTANCE})
_RULES_HEAD = ("rule", "action", "matched", "fired", "changed", "last step", "")
_READERS = ("trap", "observe", "capture", "check")
# In the status of a rule that was due and has not fired.
_DUE = "was due in"
_EVENTS = 20
_NAMES = 4


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What the report has to know of a rule."""

    action: str
    role: str = "edit"
    logged: tuple[str, ...] = ()  # the parameters whose l2 norms it records
    kind: str = GRADIENT  # what it measures, such as "gradient" or "output"
    has_all_steps: bool = True  # whether it is due in each step


@cache
def base_of(tensor: str) -> str:
    """Return `input`, `output`, `output.grad` ... without a path inside a tuple."""
    return re.sub(r"^(input|output)\b.*?(\.grad)?$", r"\1\2", tensor)


def rule_table(
    infos: Mapping[str, RuleInfo],
    statuses: Mapping[str, RuleStatus],
    events: Sequence[Event] = (),
    updates: int = 0,
) -> Table:
    rows = []
    for rule, status in statuses.items():
        info = infos.get(rule, RuleInfo("?"))
        remark = ""
        fired = f"{status.fired:,}"
        if info.role == "trap":
            # A trap only reads gradients, and the remark has the number of its trips.
            fired = "-"
            trips = [event for event in events if is_trip(event) and event.rule == rule]
            remark = trap_words(status, trips, updates)
        elif not status.fired:
            remark = "NEVER FIRED"
        elif info.role == "edit" and status.changed == 0:
            remark = "changed nothing"
        changed = "-"
        if info.role not in _READERS and status.changed is not None:
            changed = f"{100 * status.changed:.3g}%"
        last = "-" if status.last_step is None else str(status.last_step)
        names = [printable(rule), printable(info.action)]
        rows.append([*names, f"{status.matched:,}", fired, changed, last, remark])
    return Table(f"rules ({len(statuses)})", _RULES_HEAD, rows, right=frozenset({2, 3, 4, 5}))


def edits_of(infos: Mapping[str, RuleInfo]) -> set[str]:
    """Return the ids of rules that edit: what they cut is no trip."""
    return {rule for rule, info in infos.items() if info.role == "edit"}


def logged_params(infos: Mapping[str, RuleInfo], statuses: Mapping[str, RuleStatus]) -> set[str]:
    """Return the parameters whose gradients rules waited for in each step, and record."""
    logged: set[str] = set()
    for rule, status in statuses.items():
        # A gradient may have come between the steps of a rule.
        if rule not in infos or not infos[rule].has_all_steps:
            continue
        # A rule that was due and never fired has waited for the gradients in vain; others say so in their own row.
        has_waited = any(_DUE in text for text in status.warnings)
        if status.fired or has_waited:
            logged.update(infos[rule].logged)
    return logged


def trap_words(status: RuleStatus, trips: Sequence[Event], updates: int) -> str:
    """Return what a trap did in so many updates. An update without a gradient is not checked."""
    if not status.fired:
        return "NEVER CHECKED"
    checked = f"checked {count(status.fired, 'update')}"
    if status.fired < updates:
        checked = f"checked {status.fired:,} of {count(updates, 'update')}"
    if not status.altered:
        return f"{checked}, never tripped"
    text = f"{checked}, tripped {count(status.altered, 'time')}"
    if not trips:
        return text
    ranks = {trip.rank for trip in trips}
    if len(ranks) > 1:
        text += f" on {len(ranks)} ranks"
    return f"{text}, last at {max(trip.step for trip in trips)}"


def listed(names: Sequence[str]) -> str:
    text = ", ".join(map(printable, names[:_NAMES]))
    if len(names) > _NAMES:
        text += f", and {len(names) - _NAMES:,} more"
    return text


def by_kind(events: Iterable[Event]) -> Counter[str]:
    """Return how many events there are of each kind; what several ranks note of a step counts once."""
    per_rank: Counter[tuple[str, str, int, int]] = Counter()
    kinds = {}
    for event in events:
        key = (event.kind, event.rule, event.step, event.rank)
        per_rank[key] += 1
        # The first of one rank is the first of another.
        kinds[*key[:3], per_rank[key]] = event.kind
    return Counter(kinds.values())


class EventGroup(NamedTuple):
    """Events that say the same of several steps, or on several ranks: the first of them, and how many."""

    first: Event
    times: int
    steps: tuple[int, int]
    ranks: list[int]

    @property
    def repeated(self) -> str:
        if self.times == 1:
            return ""
        low, high = self.steps
        return f"x{self.times:,}, steps {low}..{high}"

    @property
    def on_ranks(self) -> str:
        if self.ranks == [0]:
            return ""
        return f"rank {', '.join(map(str, self.ranks))}"

    def lines(self) -> Iterator[str]:
        """Yield what happened and where, then the lines of the message."""
        event = self.first
        head = f"step {event.step}  {event.kind}"
        for text in (printable(event.rule), printable(event.name), self.on_ranks, self.repeated):
            if text:
                head += f"  {text}"
        yield head
        yield from map(printable, event.message.split("\n"))

    def entry(self) -> Iterator[str]:
        """Yield the same for a report, indented."""
        head, *message = self.lines()
        yield f"  {head}"
        for line in message:
            yield f"      {line}".rstrip()


def _alike(event: Event) -> tuple[str, ...]:
    # Notices without a rule differ in their wording alone, whatever numbers are in it. The second line of a trap says what
    # was done, so "giving up" is a group of its own.
    lines = event.message.split("\n", 2)
    wording = re.sub(r"\d[\d,.]*", "#", "".join(lines[:2]))
    return event.kind, event.rule, event.name, wording


def event_groups(events: Sequence[Event]) -> Iterator[EventGroup]:
    """Yield groups in the order of their first events."""
    for group in grouped(events, _alike).values():
        steps = [event.step for event in group]
        ranks = {event.rank for event in group}
        times = by_kind(group).total()
        yield EventGroup(group[0], times, (min(steps), max(steps)), sorted(ranks))


def shown_groups(events: Sequence[Event]) -> tuple[list[EventGroup], int, list[EventGroup]]:
    """Return groups to show in order: the first ones, how many events are left out, and the last ones."""
    # The beginning shows what went wrong first, the end what stopped the run.
    groups = list(event_groups(events))
    half = _EVENTS // 2
    left_out = sum(group.times for group in groups[half:-half])
    later = groups[half:]
    return groups[:half], left_out, later[-half:]


def event_lines(events: Sequence[Event]) -> Iterator[str]:
    if events:
        yield f"events ({by_kind(events).total():,})"
        yield from group_lines(events, EventGroup.entry)


def group_lines(
    events: Sequence[Event], lines_of: Callable[[EventGroup], Iterable[str]]
) -> Iterator[str]:
    """Yield the lines of the groups to show, and how many events are left out between them."""
    first, left_out, last = shown_groups(events)
    for group in first:
        yield from lines_of(group)
    if left_out:
        yield f"  ... and {left_out:,} more"
    for group in last:
        yield from lines_of(group)
