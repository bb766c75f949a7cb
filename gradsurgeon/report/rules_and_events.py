"""What each rule did, and what happened."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from gradsurgeon.common.events import Event, RuleStatus, is_trip
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.tables import Table

STAT, GRADIENT = "l2", "gradient"
COSINE, RATIO, WEIGHT, DISTANCE = "cosine", "ratio", "weight", "distance"
# What rules on weights measure, and the statistics of updates that are shown beside norms.
WEIGHTS, UPDATES = "weight", "update"
OF_UPDATES = {"ratio": "update over weight", "moved": "share of elements moved"}
OF_WEIGHTS = frozenset({WEIGHTS, UPDATES, *OF_UPDATES.values()})
LOSS_STATS = frozenset({COSINE, RATIO, WEIGHT, DISTANCE})
_RULES_HEAD = ("rule", "action", "matched", "fired", "changed", "last step", "")
_CAPTURED_HEAD = (
    "tensor",
    "step",
    "call",
    "shape",
    "dtype",
    "min",
    "mean",
    "max",
    "non-finite",
    "",
)
_CAPTURED_NUMBERS = frozenset({1, 2, 5, 6, 7, 8})
_LOAD_CAPTURED = "the tensors themselves are in the session: `session.captured(RULE)`"
_READERS = ("trap", "observe", "capture")
_EVENTS = 20
_NAMES = 4


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What the report has to know of a rule."""

    action: str
    role: str = "edit"
    logged: tuple[str, ...] = ()  # the parameters whose l2 norms it records
    kind: str = GRADIENT  # what it measures, such as "gradient" or "output"


def rule_table(
    infos: Mapping[str, RuleInfo], statuses: Mapping[str, RuleStatus], events: Sequence[Event] = ()
) -> Table:
    rows = []
    for rule, status in statuses.items():
        info = infos.get(rule, RuleInfo("?"))
        # A trap only reads gradients, and its trips are counted in the remark.
        fired = "-" if info.role == "trap" else f"{status.fired:,}"
        changed = "-"
        if info.role not in _READERS and status.changed is not None:
            changed = f"{100 * status.changed:.3g}%"
        last = "-" if status.last_step is None else str(status.last_step)
        remark = "changed nothing" if info.role == "edit" and status.changed == 0 else ""
        if not status.fired:
            remark = "NEVER LOOKED" if info.role == "trap" else "NEVER FIRED"
        elif info.role == "trap":
            trips = [event for event in events if is_trip(event) and event.rule == rule]
            remark = trap_words(status, trips)
        names = printable(rule), printable(info.action)
        rows.append((*names, f"{status.matched:,}", fired, changed, last, remark))
    return Table(f"rules ({len(statuses)})", _RULES_HEAD, rows, right=frozenset({2, 3, 4, 5}))


def captured_table(captured: Mapping[str, Any]) -> Table:
    """Return the table of the tensors that one rule has kept."""
    rows = []
    for tensor in captured["tensors"]:
        shape = tensor.get("shape")
        numbers = (tensor.get(key) for key in ("low", "mean", "high"))
        rows.append(
            (
                printable(tensor["name"]),
                str(tensor["step"]),
                str(tensor["call"]),
                "-" if shape is None else " x ".join(map(str, shape)) or "a single number",
                tensor["dtype"].removeprefix("torch."),
                *("-" if number is None else f"{number:.3g}" for number in numbers),
                f"{tensor['nonfinite']:,}" if tensor.get("nonfinite") else "-",
                printable(tensor.get("note", "")),
            )
        )
    notes = []
    if captured["more"]:
        notes.append(f"and {captured['more']:,} more, of which nothing was stored")
    notes.append(_LOAD_CAPTURED)
    rule = printable(captured["rule"])
    return Table(f"captures kept by {rule}", _CAPTURED_HEAD, rows, _CAPTURED_NUMBERS, notes=notes)


def edits_of(infos: Mapping[str, RuleInfo]) -> set[str]:
    """Return the ids of rules that edit: what they cut is no trip."""
    return {rule for rule, info in infos.items() if info.role == "edit"}


def trap_words(status: RuleStatus, trips: Sequence[Event]) -> str:
    looked = f"looked {count(status.fired, 'time')}"
    if not status.altered:
        return f"{looked}, never tripped"
    text = f"{looked}, tripped {count(status.altered, 'time')}"
    ranks = {event.rank for event in trips}
    if len(ranks) > 1:
        text += f" on {len(ranks)} ranks"
    if trips:
        text += f", last at {max(event.step for event in trips)}"
    return text


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:_NAMES])
    return shown + (f", and {len(names) - _NAMES:,} more" if len(names) > _NAMES else "")


def never_reached(names: Sequence[str]) -> str:
    return f"never got a gradient: {listed(names)}"


def by_kind(events: Iterable[Event]) -> Counter[str]:
    """Return how many events there are of each kind; what several ranks note of a step counts once."""
    per_rank: Counter[tuple[str, str, int, int]] = Counter()
    kinds = {}
    for event in events:
        of_rank = event.kind, event.rule, event.step, event.rank
        per_rank[of_rank] += 1
        # The first of one rank is the first of another.
        kinds[event.kind, event.rule, event.step, per_rank[of_rank]] = event.kind
    return Counter(kinds.values())


class EventGroup(NamedTuple):
    """Events that say the same of several steps, or on several ranks: the first of them, and how many."""

    first: Event
    times: int
    steps: tuple[int, int]
    ranks: list[int]

    @property
    def repeated(self) -> str:
        low, high = self.steps
        return f"x{self.times:,}, steps {low}..{high}" if self.times > 1 else ""

    @property
    def on_ranks(self) -> str:
        return f"rank {', '.join(map(str, self.ranks))}" if self.ranks != [0] else ""

    def lines(self) -> Iterator[str]:
        """Yield what happened and where, then the lines of the message."""
        texts = printable(self.first.rule), printable(self.first.name), self.on_ranks, self.repeated
        yield "  ".join([f"step {self.first.step}  {self.first.kind}", *filter(None, texts)])
        yield from map(printable, self.first.message.split("\n"))


def event_groups(events: Sequence[Event]) -> Iterator[EventGroup]:
    """Yield groups in the order of their first events."""
    groups: dict[tuple[str, ...], list[Event]] = {}
    for event in events:
        # Notices of no rule in particular have only their wording to be told apart by, but for the
        # numbers in it; the second line of a trap says what was done, so "giving up" stands alone.
        wording = re.sub(r"\d[\d,.]*", "#", "".join(event.message.split("\n", 2)[:2]))
        groups.setdefault((event.kind, event.rule, event.name, wording), []).append(event)
    for same in groups.values():
        steps, ranks = [one.step for one in same], sorted({one.rank for one in same})
        yield EventGroup(same[0], by_kind(same).total(), (min(steps), max(steps)), ranks)


def shown_groups(events: Sequence[Event]) -> tuple[list[EventGroup], int, list[EventGroup]]:
    """Return groups to show in order: the first ones, how many events are left out, and the last ones."""
    # The beginning tells what went wrong first, the end what stopped the run.
    groups, half = [*event_groups(events)], _EVENTS // 2
    left_out = sum(group.times for group in groups[half:-half])
    return groups[:half], left_out, groups[half:][-half:]


def event_lines(events: Sequence[Event]) -> Iterator[str]:
    if not events:
        return
    first, left_out, last = shown_groups(events)
    yield f"events ({by_kind(events).total():,})"
    yield from chain.from_iterable(map(_entry, first))
    if left_out:
        yield f"  ... and {left_out:,} more"
    yield from chain.from_iterable(map(_entry, last))


def _entry(group: EventGroup) -> list[str]:
    head, *message = group.lines()
    return [f"  {head}", *(f"      {line}".rstrip() for line in message)]
