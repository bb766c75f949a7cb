"""A report as a notebook shows it: its tables as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradsurgeon import _html
from gradsurgeon.events import Event
from gradsurgeon.report.rules_and_events import EventGroup, by_kind, event_groups
from gradsurgeon.report.sparkline import LEGEND
from gradsurgeon.report.tables import Table


def page(
    head: Sequence[str],
    tables: Sequence[Table],
    remarks: Sequence[str],
    events: Sequence[Event],
    *,
    norms: int,
) -> _html.Markup:
    """Return a report as a notebook shows it. The first so many tables are `norms`; events are oldest first."""
    parts = [part for table in tables[:norms] for part in table.html()]
    legend = [_html.listing([LEGEND])] if norms else []
    return _html.page(
        *(_html.element("p", _html.bold(line)) for line in head),
        _html.listing(remarks),
        *parts,
        *legend,
        *(part for table in tables[norms:] for part in table.html()),
        *_events(events),
    )


def _events(events: Sequence[Event]) -> Iterator[_html.Markup]:
    if not events:
        return
    first, left_out, last = event_groups(events)
    more = [("", f"... and {left_out:,} more", "", "", "", "")] if left_out else []
    rows = [*map(_event, first), *more, *map(_event, last)]
    yield _html.element("p", _html.bold(f"events ({by_kind(events).total():,})"))
    yield _html.table(("step", "event", "rule", "name", "", "message"), rows, right={0})


def _event(group: EventGroup) -> tuple[object, ...]:
    first = group.first
    line, _, rest = first.message.partition("\n")
    message = _html.folded(line, rest) if rest else line
    more = "; ".join(filter(None, (group.on_ranks, group.repeated)))
    return first.step, first.kind, first.rule, first.name, more, message
