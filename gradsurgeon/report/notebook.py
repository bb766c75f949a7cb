"""A report as a notebook shows it: tables, and histories as lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from gradsurgeon import _html
from gradsurgeon.events import Event
from gradsurgeon.report.loss_lines import (
    PAIR_HEAD,
    PAIR_HINTS,
    PAIR_NUMBERS,
    WEIGHT_HEAD,
    WEIGHT_NUMBERS,
    combined_remarks,
    combined_title,
    compared_remarks,
    compared_title,
    pair_cells,
    weight_rows,
)
from gradsurgeon.report.losses import OfLosses
from gradsurgeon.report.rules_and_events import (
    RULE_NUMBERS,
    RULES_HEAD,
    EventGroup,
    by_kind,
    event_groups,
)
from gradsurgeon.report.signed_curve import Curve, means_of
from gradsurgeon.report.sparkline import decades, largest

if TYPE_CHECKING:
    from gradsurgeon.report.norms import NormTable

_WIDTH, _HEIGHT = 160, 18
_PAIRS = 28  # those of eight losses
_BAD = "#e3262d"


def page(
    head: Sequence[str],
    *,
    tables: Sequence[NormTable],
    norms_title: str,
    remarks: Sequence[str],
    of_losses: OfLosses,
    rules: Sequence[Sequence[object]],
    events: Sequence[Event],
    observed: bool,
) -> _html.Markup:
    """Return a report as a notebook shows it.

    Args:
        head: the first lines.
        tables: of norms, one for each kind of tensors.
        norms_title: what stands in their place.
        remarks: what stands out.
        of_losses: what was recorded of several losses.
        rules: a row for each rule, as `RULES_HEAD` names the cells.
        events: oldest first.
        observed: whether rules only said what they would have changed.
    """
    return _html.page(
        *(_html.element("p", _html.bold(line)) for line in head),
        *_norms(tables, norms_title, remarks),
        *_losses(of_losses, observed=observed),
        *_rules(rules),
        *_events(events),
    )


def _losses(found: OfLosses, *, observed: bool) -> Iterator[_html.Markup]:
    for compared in found.compared:
        yield _html.element("p", _html.bold(compared_title(compared)))
        worst = compared.worst()
        rows: list[list[object]] = [[*pair_cells(one)] for one in worst[:_PAIRS]]
        for row, one in zip(rows, worst, strict=False):
            row[1] = level_line(one.curve, -1.0, 1.0)
        yield _html.table(PAIR_HEAD, rows, right=PAIR_NUMBERS)
        notes = [*PAIR_HINTS, *compared_remarks(compared)]
        if len(worst) > _PAIRS:
            text = f"and {len(worst) - _PAIRS:,} more; the lowest mean cosines are shown"
            notes.insert(0, text)
        yield _html.listing(notes)
    for combined in found.combined:
        yield _html.element("p", _html.bold(combined_title(combined)))
        low = min(0.0, *(one.least for one in combined.weights))
        high = max(1.0, *(one.largest for one in combined.weights))
        rows = [[*row] for row in weight_rows(combined)[:_PAIRS]]
        for row, weighed in zip(rows, combined.weights, strict=False):
            row[1] = level_line(weighed.curve, low, high)
        yield _html.table(WEIGHT_HEAD, rows, right=WEIGHT_NUMBERS)
        yield _html.listing(combined_remarks(combined, observed=observed))


def level_line(curve: Curve, low: float, high: float) -> _html.Markup:
    """Draw a curve between two levels, with a line at 0."""
    means = means_of(curve, _WIDTH // 2)
    step, room = _WIDTH / max(1, len(means)), _HEIGHT - 4

    def height(value: float) -> str:
        return f"{_HEIGHT - 2 - (value - low) / (high - low) * room:.1f}"

    points = [f"{(at + 0.5) * step:.1f},{height(value)}" for at, (_, value) in enumerate(means)]
    zero = f'<path d="M0 {height(0.0)}H{_WIDTH}" stroke-width="0.3"/>'
    drawn = f'<polyline points="{" ".join([*points, *points[-1:]])}"/>'
    return _svg(f"{zero}{drawn}")


def _norms(
    tables: Sequence[NormTable], title: str, remarks: Sequence[str]
) -> Iterator[_html.Markup]:
    from gradsurgeon.report.norms import NORM_NUMBERS, norm_head  # noqa: PLC0415 # needs numpy

    for found in tables:
        yield _html.element("p", _html.bold(found.title))
        yield _html.table(norm_head(found), _norm_rows(found), right=NORM_NUMBERS)
        if found.notes:
            yield _html.listing(found.notes)
    if title:
        yield _html.element("p", _html.bold(title))
    elif tables:
        yield _html.listing(
            [
                "history: a log scale per row; red: a norm that is not finite; a tick at the bottom: norm 0; a gap: no gradient"
            ]
        )
    if remarks:
        yield _html.listing(remarks)


def _norm_rows(found: NormTable) -> Iterator[list[object]]:
    from gradsurgeon.report.norms import norm_cells, spikiest  # noqa: PLC0415 # needs numpy

    worst = spikiest(found.shown)
    for track in found.shown:
        cells: list[object] = [*norm_cells(track, several=found.several)]
        cells[1] = sparkline(track.cells(_WIDTH // 2))
        if track is worst:
            cells[4] = _html.bold(cells[4])  # the spike
        yield cells


def _rules(rows: Sequence[Sequence[object]]) -> Iterator[_html.Markup]:
    if rows:
        yield _html.element("p", _html.bold(f"rules ({len(rows)})"))
        yield _html.table(RULES_HEAD, rows, right=RULE_NUMBERS)


def _events(events: Sequence[Event]) -> Iterator[_html.Markup]:
    if not events:
        return
    first, left_out, last = event_groups(events)
    rows = [*map(_event, first)]
    if left_out:
        rows.append(("", f"... and {left_out:,} more", "", "", "", ""))
    rows += map(_event, last)
    yield _html.element("p", _html.bold(f"events ({by_kind(events).total():,})"))
    yield _html.table(("step", "event", "rule", "name", "", "message"), rows, right={0})


def _event(group: EventGroup) -> tuple[object, ...]:
    first = group.first
    line, _, rest = first.message.partition("\n")
    message = _html.folded(line, rest) if rest else line
    more = "; ".join(filter(None, (group.on_ranks, group.repeated)))
    return first.step, first.kind, first.rule, first.name, more, message


def sparkline(norms: Sequence[float | None]) -> _html.Markup:
    """Draw a history of norms on a log scale as SVG in the colour of the text; ``None`` is no gradient."""
    cells = largest(norms, _WIDTH // 2)
    logs = [math.log10(top) for top in cells if top is not None and 0 < top < math.inf]
    low, high = decades(logs)
    step = _WIDTH / max(1, len(cells))

    def point(at: int, top: float) -> str:
        height = max(0.0, (math.log10(top) - low) / (high - low))
        return f"{(at + 0.5) * step:.1f},{_HEIGHT - 2 - height * (_HEIGHT - 4):.1f}"

    places = [(at, top) for at, top in enumerate(cells)]
    shapes = []
    for drawn, run in groupby(places, key=lambda place: _is_drawn(place[1])):
        if drawn:
            points = [point(at, top) for at, top in run if top is not None]
            # A line of one point has no length, but round ends.
            shapes.append(f'<polyline points="{" ".join([*points, points[-1]])}"/>')
    shapes += [
        f'<path d="M{(at + 0.5) * step:.1f} {ends}" stroke="{colour}"/>'
        for at, top in places
        if top is not None and not _is_drawn(top)
        for ends, colour in [
            (f"{_HEIGHT - 4}V{_HEIGHT}", "currentColor") if top == 0 else (f"0V{_HEIGHT}", _BAD)
        ]
    ]
    return _svg("".join(shapes))


def _svg(shapes: str) -> _html.Markup:
    return _html.Markup(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" fill="none" '
        f'stroke="currentColor" stroke-width="1.2" stroke-linecap="round">{shapes}</svg>'
    )


def _is_drawn(top: float | None) -> bool:
    return top is not None and 0 < top < math.inf
