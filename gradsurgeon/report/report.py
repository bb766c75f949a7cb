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
from gradsurgeon.records.store.memory import LOSS, NOTHING_RECORDED, RATE
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
        if not width:
            width = shutil.get_terminal_size((_COLUMNS, 24)).columns
        parts = ["\n".join(self.head)]
        if self.remarks:
            parts.append("\n".join(f"  {remark}" for remark in self.remarks))
        for place, table in enumerate(self.tables, 1):
            text = "\n".join(_text(table, width))
            if place == len(self.norms):
                text += f"\n  {LEGEND}"
            parts.append(text)
        if self.events:
            parts.append("\n".join(event_lines(self.events)))
        return "\n\n".join(parts)

    @cached_property
    def tables(self) -> list[Table]:
        """Every table in the order of a reader: norms by kind, losses, rules, and captured tensors."""
        tables = [norms.table for norms in self.norms]
        if self.norms_title:
            tables.append(Table(self.norms_title, (), ()))
        from gradsurgeon.report.losses import loss_tables  # noqa: PLC0415 # needs numpy

        for table, _ in loss_tables([*self.losses, *self.rates], observed=self.observed):
            tables.append(table)
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
        if self.norms:
            return ""
        stats = {part.key.stat for part in self.series} - {LOSS, RATE}
        stats_of_losses = {loss.stat for loss in self.losses}
        if stats_of_losses and stats <= stats_of_losses:
            return ""
        recorded = printable(", ".join(sorted(stats)))
        if not recorded:
            logs_norms = any(info.logged for info in self.rules.values())
            recorded = "nothing yet" if logs_norms else NOTHING_RECORDED
        return f"norms: no l2 recorded; recorded: {recorded}"

    @cached_property
    def losses(self) -> list[LossSeries]:
        """What was recorded of losses: values, conflicts, and weights."""
        from gradsurgeon.report.losses import losses_of  # noqa: PLC0415 # needs numpy

        return losses_of(self.series, set(self.params))

    @cached_property
    def rates(self) -> list[LossSeries]:
        """The learning rates of the optimizers, at most 2,000 values each, by names such as ``AdamW/0`` of the first group."""
        from gradsurgeon.report.losses import rates_of  # noqa: PLC0415 # needs numpy

        if self.steps is None:
            return []
        return rates_of(self.series, self.steps[1])

    @property
    def newest(self) -> str:
        """The last losses and learning rates, in words."""
        words = [f"{loss.name} {loss.values[-1]:.4g}" for loss in self.tagged]
        rates = sorted({float(rate.values[-1]) for rate in self.rates})
        if rates:
            words.append(f"learning rate {rates[0]:.4g}")
        if len(rates) > 1:
            words[-1] += f" to {rates[-1]:.4g}"
        return printable(", ".join(words))

    @property
    def tagged(self) -> list[LossSeries]:
        """The values of losses: tagged ones, and those that backward passes began from."""
        return [loss for loss in self.losses if loss.stat not in LOSS_STATS]

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """What stands out, a sentence each."""
        history = self.history
        from gradsurgeon.report.callouts import callouts  # noqa: PLC0415 # needs numpy

        remarks = list(callouts(history, len(self.params)))
        if self.ranks:
            remarks.append(self.ranks)
        silent = self._silent()
        if silent:
            remarks.append(never_reached(silent))
        return tuple(remarks)

    @property
    def is_partial(self) -> bool:
        """Whether older rows are left out."""
        for part in self.series:
            if part.skipped:
                return True
        return bool(self.dropped)

    def _silent(self) -> list[str]:
        """Return the parameters that should learn and had no gradient in any update."""
        if self.is_partial:
            return []  # the rows that are gone may have had a gradient
        logged: set[str] = set()
        for rule, status in self.statuses.items():
            if rule not in self.rules:
                continue
            # A rule that was due and never fired has waited for the gradients in vain; others say so in their own row.
            has_waited = any(_DUE in text for text in status.warnings)
            if status.fired or has_waited:
                logged.update(self.rules[rule].logged)
        logged -= self.frozen.keys()
        for kind, name in self.history.shown:
            if kind == GRADIENT:
                logged.discard(name)
        return [name for name in self.params if name in logged]

    @property
    def frozen_note(self) -> str:
        """A sentence on parameters with `requires_grad` off, empty if there are none."""
        frozen = dict(self.frozen)
        if is_installed("numpy"):
            # A parameter that learns later has norms.
            for _, name in self.history.shown:
                frozen.pop(name, None)
        if not frozen:
            return ""
        names = sorted(frozen)
        names.sort(key=frozen.__getitem__, reverse=True)
        return f"requires_grad off: {count(len(names), 'parameter')}, largest {listed(names)}"

    @property
    def head(self) -> list[str]:
        """The first lines: how the run ended, what was run, and how far it came."""
        notes = [self._extent()]
        if self.dropped:
            notes.append(f"{count(self.dropped, 'row')} dropped, the oldest: memory is bounded")
        notes += filter(None, self.notes)
        if self.frozen_note:
            notes.append(self.frozen_note)
        text = "; ".join(map(printable, notes))
        lines = []
        if self.ended is not None:
            lines += self.ended.lines
        lines.append(f"summary: {printable(self.title)}: {text}")
        return lines

    def _extent(self) -> str:
        """Return the steps and the number of events, in words."""
        text = "no step seen"
        if self.steps is not None:
            first, last = self.steps
            text = f"steps {first}..{last}"
        kinds = by_kind(self.events)
        text += f", {count(kinds.total(), 'event')}"
        if kinds:
            counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
            text += f" ({counts})"
        return text

    @cached_property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step, `None` if there was none."""
        seen: list[int] = []
        for part in self.series:
            seen += part.ends()
        for status in self.statuses.values():
            if status.last_step is not None:
                seen.append(status.last_step)
        if self.end is not None and self.end > (self.start or 0):
            seen.append(self.end - 1)
        if not seen:
            return None
        if self.start is not None:
            seen.append(self.start)
        return min(seen), max(seen)


def _text(table: Table, columns: int) -> Iterator[str]:
    yield from table.lines(columns)
    for note in table.notes:
        yield f"  ... {note}" if note.startswith("and ") else f"  {note}"


def to_dict(report: Report) -> dict[str, Any]:
    """Return a report as values that JSON has, documented under ``The report as JSON``."""
    ids = dict.fromkeys([*report.rules, *report.statuses])
    remarks = list(report.remarks)
    # A sentence like the others, though nothing may be wrong.
    if report.frozen_note:
        remarks.append(report.frozen_note)
    return {
        "version": 1,
        "title": report.title,
        "ended": _ended(report.ended),
        "steps": None if report.steps is None else list(report.steps),
        "notes": list(report.notes),
        "remarks": remarks,
        "params": list(report.params),
        "rules": [_rule(report, rule) for rule in ids],
        "events": list(map(asdict, report.events)),
        "norms": list(map(_norms, report.history.tracks)),
        "losses": list(map(_losses, report.losses)),
        "rates": list(map(_rate, report.rates)),
        "median_of_one_step_in": report.history.rows_of_a_column,
    }


def _ended(ending: Ending | None) -> dict[str, Any] | None:
    if ending is None:
        return None
    ranks = {str(rank): words for rank, words in ending.ranks.items()}
    return {"state": ending.state, "words": ending.words, "ranks": ranks}


def _rule(report: Report, rule: str) -> dict[str, Any]:
    info = report.rules.get(rule, RuleInfo("?"))
    status = report.statuses.get(rule)
    values = None
    if status is not None:
        values = asdict(status)
        values["changed"] = status.changed
    return {"id": rule, "action": info.action, "role": info.role, "status": values}


def _losses(loss: LossSeries) -> dict[str, Any]:
    from gradsurgeon.report.losses import MOST_POINTS, thinned  # noqa: PLC0415 # needs numpy

    calls = len(loss.values)
    values: dict[str, Any] = {"rule": loss.rule, "stat": loss.stat, "name": loss.name}
    values["steps"], values["values"] = thinned(loss.steps, loss.values, MOST_POINTS)
    values["calls"] = calls
    values["nonfinite"] = calls - len(loss.finite)
    for word, number in loss.numbers.items():
        values[word] = json_number(number)
    return values


def _rate(rate: LossSeries) -> dict[str, Any]:
    optimizer, _, group = rate.name.rpartition("/")
    # Records are float32.
    values = [float(f"{value:.7g}") for value in rate.values]
    return {
        "optimizer": optimizer,
        "group": int(group),
        "steps": rate.steps.tolist(),
        "values": values,
    }


def _norms(track: Track) -> dict[str, Any]:
    values: dict[str, Any] = {"name": track.name}
    values.update(track.origin._asdict())
    for word in ("first", "median", "largest", "last"):
        values[word] = json_number(getattr(track, word))
    values["spike"] = None
    spike = track.spike
    if spike is not None:
        value = json_number(spike.value)
        times = json_number(spike.times)
        values["spike"] = {"step": spike.step, "value": value, "times": times}
    steps = track.nonfinite_steps
    values["nonfinite"] = len(steps)
    values["nonfinite_step"] = int(steps[0]) if len(steps) else None
    values["zero_since"] = track.zero_since
    return values
