"""A report: plain values, the text made of them, and the form for programs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gradsurgeon.common import _html
from gradsurgeon.common._libraries import is_installed, library
from gradsurgeon.common.events import Event, RuleStatus
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.layout import json_number
from gradsurgeon.records.store.memory import NOTHING_RECORDED
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.report.ending import Ending
from gradsurgeon.report.rules_and_events import (
    GRADIENT,
    LOSS_STATS,
    RuleInfo,
    by_kind,
    captured_table,
    event_lines,
    listed,
    never_reached,
    rule_table,
)
from gradsurgeon.report.tables import LEGEND, Table

if TYPE_CHECKING:
    from gradsurgeon.report.history import History
    from gradsurgeon.report.losses import LossSeries
    from gradsurgeon.report.norms import NormTable
    from gradsurgeon.report.track import Track

# Of a page in a notebook, and of a stream that is no terminal.
_COLUMNS = 100
# In the status of a rule that was due and has not fired.
_DUE = "was due in"


@dataclass(frozen=True)
class Report:
    """A run in plain values. ``str(report)`` is the text; in it ``0..99`` includes both ends.

    Attributes:
        title: what was run, for the first line.
        params: canonical names in the order of the model.
        rules: every rule by id, in file order.
        statuses: what each rule did.
        series: what every rank has recorded.
        dropped: the oldest rows, for which a session had no memory.
        events: what happened, oldest first.
        notes: what else there is to know of the run as a whole.
        start: number of the first update, be it one in which no rule acted.
        end: number of the one after the last, where it is known.
        captured: what is stored of captured tensors, by rule.
        observed: whether rules only said what they would have changed.
        ended: how the run ended, `None` for a session.
        frozen: parameters with `requires_grad` off and their numbers of elements.
        are_replicas: whether `DistributedDataParallel` held the model.
    """

    title: str
    params: tuple[str, ...]
    rules: Mapping[str, RuleInfo]
    statuses: Mapping[str, RuleStatus]
    series: Sequence[Part] = ()
    dropped: int = 0
    events: Sequence[Event] = ()
    notes: Sequence[str] = ()
    start: int | None = None
    end: int | None = None
    captured: Sequence[Mapping[str, Any]] = ()
    observed: bool = False
    ended: Ending | None = None
    frozen: Mapping[str, int] = field(default_factory=dict)
    are_replicas: bool = False

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return _html.pre(self.text(width=_COLUMNS))

    def text(self, *, width: int | None = None) -> str:
        """Return the whole report; `width` columns are filled, by default those of the terminal."""
        columns = width or shutil.get_terminal_size((_COLUMNS, 24)).columns
        parts = [self.head, [f"  {remark}" for remark in self.remarks]]
        for place, table in enumerate(self.tables, 1):
            lines = list(_text(table, columns))
            if place == len(self.norms):
                lines.append(f"  {LEGEND}")
            parts.append(lines)
        parts.append(list(event_lines(self.events)))
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    @cached_property
    def tables(self) -> list[Table]:
        """Every table in the order of a reader: norms by kind, losses, rules, and captured tensors."""
        tables = [norms.table for norms in self.norms]
        if self.norms_title:
            tables.append(Table(self.norms_title, (), ()))
        from gradsurgeon.report import losses  # noqa: PLC0415 # needs numpy

        tables += (table for table, _ in losses.loss_tables(self.losses, observed=self.observed))
        if self.statuses:
            tables.append(rule_table(self.rules, self.statuses, self.events))
        tables += map(captured_table, self.captured)
        return tables

    def history_of(self, *, rule: str | None = None) -> History:
        """Read the norms of all rules, or of one; a `GradSurgeonError` says that numpy is missing."""
        library("numpy", "report", "a report of recorded norms")
        from gradsurgeon.report.history import History  # noqa: PLC0415 # needs numpy

        lowest = of_lowest_ranks(self.series)
        return History(lowest, self._kinds, self.params, rule=rule)

    @property
    def _kinds(self) -> dict[str, str]:
        return {rule: info.kind for rule, info in self.rules.items()}

    @cached_property
    def history(self) -> History:
        """The norms, read once."""
        return self.history_of()

    @cached_property
    def ranks(self) -> str:
        """A sentence on replicas that differ, empty if none do."""
        from gradsurgeon.report.norms import ranks_that_differ  # noqa: PLC0415 # needs numpy

        return ranks_that_differ(self.series, self._kinds, are_replicas=self.are_replicas)

    @cached_property
    def norms(self) -> list[NormTable]:
        """The tables of norms, one for each kind of tensors."""
        history = self.history
        from gradsurgeon.report.norms import norm_tables  # noqa: PLC0415 # needs numpy

        return list(norm_tables(history))

    @property
    def norms_title(self) -> str:
        """The sentence that stands where no norm was recorded, empty if nobody asked for norms."""
        stats = {part.key.stat for part in self.series}
        if self.norms or (self.losses and stats <= {loss.stat for loss in self.losses}):
            return ""
        recorded = printable(", ".join(sorted(stats)))
        if not recorded:
            logs = any(info.logged for info in self.rules.values())
            recorded = "nothing yet" if logs else NOTHING_RECORDED
        return f"norms: no l2 recorded; recorded: {recorded}"

    @cached_property
    def losses(self) -> list[LossSeries]:
        """What was recorded of losses: values, conflicts, and weights."""
        from gradsurgeon.report.losses import losses_of  # noqa: PLC0415 # needs numpy

        return losses_of(self.series, set(self.params))

    @property
    def tagged(self) -> list[LossSeries]:
        """The values of losses that the script has tagged."""
        return [loss for loss in self.losses if loss.stat not in LOSS_STATS]

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """What stands out, a sentence each."""
        history = self.history
        from gradsurgeon.report.callouts import callouts  # noqa: PLC0415 # needs numpy

        remarks = list(callouts(history, len(self.params)))
        if self.ranks:
            remarks.append(self.ranks)
        if silent := self._silent():
            remarks.append(never_reached(silent))
        return tuple(remarks)

    @property
    def is_partial(self) -> bool:
        """Whether older rows are left out."""
        return bool(self.dropped) or any(part.skipped for part in self.series)

    def _silent(self) -> list[str]:
        """Return the parameters that should learn and had no gradient in any update."""
        if self.is_partial:
            return []  # the rows that are gone may have had one
        logged: set[str] = set()
        for rule, status in self.statuses.items():
            # A rule that was due and never fired has waited for the gradients in vain; others say so in their own row.
            has_waited = any(_DUE in text for text in status.warnings)
            if rule in self.rules and (status.fired or has_waited):
                logged.update(self.rules[rule].logged)
        shown = {name for kind, name in self.history.shown if kind == GRADIENT}
        logged -= shown | self.frozen.keys()
        return [name for name in self.params if name in logged]

    @property
    def frozen_note(self) -> str:
        """A sentence on parameters with `requires_grad` off, empty if there are none."""
        # A parameter that learns later has norms.
        having = {name for _, name in self.history.shown} if is_installed("numpy") else set()
        names = sorted(self.frozen.keys() - having, key=lambda name: (-self.frozen[name], name))
        if not names:
            return ""
        return f"requires_grad off: {count(len(names), 'parameter')}, largest {listed(names)}"

    @property
    def head(self) -> list[str]:
        """The first lines: how the run ended, what was run, and how far it came."""
        lines = [] if self.ended is None else self.ended.lines
        kinds = by_kind(self.events)
        counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        steps = f"steps {self.steps[0]}..{self.steps[1]}" if self.steps else "no step seen"
        notes = [f"{steps}, {count(kinds.total(), 'event')}" + (f" ({counts})" if counts else "")]
        if self.dropped:
            notes.append(f"{count(self.dropped, 'row')} dropped, the oldest: memory is bounded")
        notes += filter(None, (*self.notes, self.frozen_note))
        return [*lines, f"summary: {printable(self.title)}: {'; '.join(map(printable, notes))}"]

    @cached_property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step, `None` if there was none."""
        ends = [end for part in self.series for end in part.ends()]
        ends += [one.last_step for one in self.statuses.values() if one.last_step is not None]
        if self.end is not None and self.end > (self.start or 0):
            ends.append(self.end - 1)
        if self.start is not None and ends:
            ends.append(self.start)
        return (min(ends), max(ends)) if ends else None


def _text(table: Table, columns: int) -> Iterator[str]:
    yield from table.lines(columns)
    for note in table.notes:
        yield f"  ... {note}" if note.startswith("and ") else f"  {note}"


def to_dict(report: Report) -> dict[str, Any]:
    """Return a report as values that JSON has, documented under ``The report as JSON``."""
    rules = []
    for rule in dict.fromkeys((*report.rules, *report.statuses)):
        info = report.rules.get(rule, RuleInfo("?"))
        status = report.statuses.get(rule)
        values = None
        if status is not None:
            values = {**asdict(status), "changed": status.changed}
        rules.append({"id": rule, "action": info.action, "role": info.role, "status": values})
    ended = None
    if report.ended is not None:
        ended = {
            "state": report.ended.state,
            "words": report.ended.words,
            "ranks": {str(rank): words for rank, words in report.ended.ranks.items()},
        }
    return {
        "version": 1,
        "title": report.title,
        "ended": ended,
        "steps": None if report.steps is None else list(report.steps),
        "notes": list(report.notes),
        # A sentence like the others, though nothing may be wrong.
        "remarks": [*report.remarks, *filter(None, [report.frozen_note])],
        "params": list(report.params),
        "rules": rules,
        "events": [asdict(event) for event in report.events],
        "norms": list(map(_norms, report.history.tracks)),
        "losses": list(map(_losses, report.losses)),
        "median_of_one_step_in": report.history.rows_of_a_column,
    }


def _losses(loss: LossSeries) -> dict[str, Any]:
    return {
        "rule": loss.rule,
        "stat": loss.stat,
        "name": loss.name,
        "steps": [int(loss.steps[0]), int(loss.steps[-1])],
        "calls": len(loss.values),
        "nonfinite": len(loss.values) - len(loss.finite),
        **{field: json_number(value) for field, value in loss.numbers.items()},
    }


def _norms(track: Track) -> dict[str, Any]:
    spike = track.spike
    return {
        "name": track.name,
        "kind": track.origin.kind,
        "rule": track.origin.rule,
        "point": track.origin.point,
        "first": json_number(track.first),
        "median": json_number(track.median),
        "largest": json_number(track.largest),
        "last": json_number(track.last),
        "spike": None
        if spike is None
        else {
            "step": spike.step,
            "value": json_number(spike.value),
            "times": json_number(spike.times),
        },
        "nonfinite": len(track.nonfinite_steps),
        "nonfinite_step": next(iter(track.nonfinite_steps.tolist()), None),
        "zero_since": track.zero_since,
    }
