"""What each rule did, and what happened."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.planning.table import count, grid

_EVENTS = 20
_RULE_COLUMNS = ("rule", "action", "matched", "fired", "changed", "last step", "")


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
    if statuses:
        yield f"rules ({len(statuses)})"
        rows = rule_rows(infos, statuses, events)
        yield from grid([_RULE_COLUMNS, *rows], right=frozenset({2, 3, 4, 5}))


def rule_rows(
    infos: Mapping[str, RuleInfo], statuses: Mapping[str, RuleStatus], events: Sequence[Event]
) -> list[tuple[str, ...]]:
    """Return what each rule did, as the cells of a table: id, action, matched, fired, changed, last step, remark."""
    rows: list[tuple[str, ...]] = []
    for rule, status in statuses.items():
        info = infos.get(rule, RuleInfo("?"))
        fired, changed = f"{status.fired:,}", f"{100 * status.changed:.3g}%"
        if info.role in ("trap", "observe", "capture"):
            changed = "-"
        if info.role == "trap":  # it only reads gradients, and its trips are counted in the remark
            fired = "-"
        last = "-" if status.last_step is None else str(status.last_step)
        remark = _remark(info, status, [e for e in events if (e.kind, e.rule) == ("trap", rule)])
        names = printable(rule), printable(info.action)
        rows.append((*names, f"{status.matched:,}", fired, changed, last, remark))
    return rows


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
    most: Counter[tuple[str, str, int]] = Counter()
    for (kind, rule, step, _), number in per_rank.items():
        most[kind, rule, step] = max(number, most[kind, rule, step])
    kinds: Counter[str] = Counter()
    for (of_kind, _, _), number in most.items():
        kinds[of_kind] += number
    return kinds


def event_lines(events: Sequence[Event]) -> Iterator[str]:
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
    half = _EVENTS // 2
    left_out = folded[half:-half]
    yield f"events ({by_kind(events).total():,})"
    yield from chain.from_iterable(map(_entry, folded[:half]))
    if left_out:
        yield f"  ... and {sum(by_kind(group).total() for group in left_out):,} more"
    yield from chain.from_iterable(map(_entry, folded[half:][-half:]))


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
