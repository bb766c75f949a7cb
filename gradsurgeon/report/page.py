"""A report: plain values, and the text made of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from gradsurgeon.errors import printable
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.planning.table import count
from gradsurgeon.report.happened import RuleInfo, by_kind, event_lines, rule_lines
from gradsurgeon.report.measured import InMemory, Measured
from gradsurgeon.report.norms import norm_lines
from gradsurgeon.store import Records

# Of a page in a notebook, and of a stream that is no terminal.
_COLUMNS = 100


@dataclass(frozen=True)
class Report:
    """A run in plain values; ``str(report)`` is the text, in which ``0..99`` is both ends and between.

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
    """

    title: str
    params: tuple[str, ...]
    rules: Mapping[str, RuleInfo]
    statuses: Mapping[str, RuleStatus]
    records: Records | Measured = field(default_factory=Records)
    events: Sequence[Event] = ()
    notes: Sequence[str] = ()
    start: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text(width=_COLUMNS))}</pre>"

    def text(self, *, width: int | None = None, ascii_only: bool = False) -> str:
        """Return the whole report.

        Args:
            width: columns to fill, those of the terminal where not given.
            ascii_only: draw and write with ASCII only, for streams that cannot encode blocks.
        """
        columns = width or shutil.get_terminal_size((_COLUMNS, 24)).columns
        sections = [
            [self._header()],
            list(norm_lines(self, columns, ascii_only=ascii_only)),
            list(rule_lines(self.rules, self.statuses, self.events)),
            list(event_lines(self.events)),
        ]
        text = "\n\n".join("\n".join(section) for section in sections if section)
        return text.encode("ascii", "backslashreplace").decode("ascii") if ascii_only else text

    @property
    def measured(self) -> Measured:
        """What the records say, wherever they are."""
        return InMemory(self.records) if isinstance(self.records, Records) else self.records

    def _header(self) -> str:
        seen = list(self.measured.span() or ())
        seen += [one.last_step for one in self.statuses.values() if one.last_step is not None]
        if self.end is not None and self.end > (self.start or 0):
            seen.append(self.end - 1)
        if self.start is not None and seen:
            seen.append(self.start)
        steps = f"steps {min(seen)}..{max(seen)}" if seen else "no step seen"
        kinds = by_kind(self.events)
        each = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        events = count(sum(kinds.values()), "event") + (f" ({each})" if each else "")
        dropped = self.records.dropped
        lost = f"{count(dropped, 'row')} dropped, the oldest: memory is bounded" if dropped else ""
        notes = "".join(f"; {printable(note)}" for note in (lost, *self.notes) if note)
        return f"summary: {printable(self.title)}: {steps}, {events}{notes}"
