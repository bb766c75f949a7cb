"""A report: plain values, and the text made of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.planning.table import count
from gradsurgeon.report import notebook
from gradsurgeon.report.loss_lines import loss_lines
from gradsurgeon.report.losses import OfLosses, of_measurements
from gradsurgeon.report.measurements import InMemory, WholeMeasurements
from gradsurgeon.report.norms import norm_lines, norm_table
from gradsurgeon.report.rules_and_events import (
    RuleInfo,
    by_kind,
    event_lines,
    rule_lines,
    rule_rows,
)
from gradsurgeon.store import Records

# Of a page in a notebook, and of a stream that is no terminal.
_COLUMNS = 100


@dataclass(frozen=True)
class Report:
    """A run in plain values. ``str(report)`` is the text; in it ``0..99`` includes both ends.

    Attributes:
        title: what was run, for the first line.
        params: canonical names in the order of the model.
        rules: every rule by id, in file order.
        statuses: what each rule did.
        records: everything measured, in memory or on disk.
        events: what happened, oldest first.
        notes: what else there is to know of the run as a whole.
        start: number of the first update, be it one in which no rule acted.
        end: number of the one after the last, where it is known.
        captures: a line on each rule that kept tensors, of a run directory.
        observed: whether rules only said what they would have changed.
    """

    title: str
    params: tuple[str, ...]
    rules: Mapping[str, RuleInfo]
    statuses: Mapping[str, RuleStatus]
    records: Records | WholeMeasurements = field(default_factory=Records)
    events: Sequence[Event] = ()
    notes: Sequence[str] = ()
    start: int | None = None
    end: int | None = None
    captures: Sequence[str] = ()
    observed: bool = False

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        measurements, of_losses, norms = self.measurements, self.of_losses(), None
        if not of_losses.stats or measurements.stats - of_losses.stats:
            norms = norm_table(measurements, self.params, self.rules, self.statuses)
        rules = list(rule_rows(self.rules, self.statuses, self.events))
        return notebook.page(
            self._header(),
            norms=norms,
            sampled=measurements.sampled,
            of_losses=of_losses,
            rules=rules,
            events=self.events,
            observed=self.observed,
        )

    def text(self, *, width: int | None = None) -> str:
        """Return the whole report.

        Args:
            width: columns to fill, those of the terminal where not given.
        """
        columns = width or shutil.get_terminal_size((_COLUMNS, 24)).columns
        measurements, of_losses = self.measurements, self.of_losses()
        norms: Iterable[str] = norm_lines(
            measurements, self.params, self.rules, self.statuses, columns=columns
        )
        if not (measurements.stats - of_losses.stats) and of_losses.stats:
            norms = ()  # that there are none is no news where nobody asked for them
        losses = loss_lines(of_losses, observed=self.observed, columns=columns)
        rules = rule_lines(self.rules, self.statuses, self.events)
        parts = [[self._header()], norms, losses, self.captures, rules, event_lines(self.events)]
        return "\n\n".join(filter(None, map("\n".join, parts)))

    @property
    def measurements(self) -> WholeMeasurements:
        """What the records say, in memory or on disk."""
        return InMemory(self.records) if isinstance(self.records, Records) else self.records

    def of_losses(self) -> OfLosses:
        """Return what was recorded of several losses. Reads it all."""
        return of_measurements(self.measurements, self.rules)

    def _header(self) -> str:
        steps = list(self.measurements.span() or ())
        steps += [one.last_step for one in self.statuses.values() if one.last_step is not None]
        if self.end is not None and self.end > (self.start or 0):
            steps.append(self.end - 1)
        if self.start is not None and steps:
            steps.append(self.start)
        span = f"steps {min(steps)}..{max(steps)}" if steps else "no step seen"
        kinds = by_kind(self.events)
        events = count(kinds.total(), "event")
        if kinds:
            events += f" ({', '.join(f'{number:,} {kind}' for kind, number in kinds.items())})"
        notes = [f"{span}, {events}"]
        if dropped := self.records.dropped:
            notes.append(f"{count(dropped, 'row')} dropped, the oldest: memory is bounded")
        said = map(printable, (*notes, *self.notes))
        return f"summary: {printable(self.title)}: {'; '.join(said)}"
