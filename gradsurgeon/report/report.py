"""A report: plain values, and the text made of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from gradsurgeon.common import _html
from gradsurgeon.common._libraries import is_installed, library
from gradsurgeon.common.events import Event, RuleStatus
from gradsurgeon.errors import printable
from gradsurgeon.language import packs
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.memory import LOSS, NOTHING_RECORDED, RATE
from gradsurgeon.records.store.recorded import RankEnd, of_lowest_ranks
from gradsurgeon.report.band import REPLICAS, Callout, Outcome, outcome_of
from gradsurgeon.report.ending import Ending, EventTally, ending_of, tally_of
from gradsurgeon.report.ranks import RankProgress, progress_of, rank_lines
from gradsurgeon.report.rules_and_events import (
    GRADIENT,
    LOSS_STATS,
    RuleInfo,
    by_kind,
    edits_of,
    event_lines,
    listed,
    logged_params,
    rule_table,
)
from gradsurgeon.report.tables import LEGEND, Table
from gradsurgeon.tensors.statistics import statistic_of

if TYPE_CHECKING:
    from gradsurgeon.report.history import History
    from gradsurgeon.report.losses import LossSeries

# The width of a page in a notebook, and of a stream that is no terminal.
_COLUMNS = 100


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
        observed: whether rules only said what they would have changed.
        ends: how each rank of a run directory ended, and when it last wrote; nothing of a session.
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
    observed: bool = False
    ends: Mapping[int, RankEnd] = field(default_factory=dict)
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
        parts: list[Iterable[str]] = [[*self.head, *rank_lines(self.progress)]]
        if self.callouts:
            parts.append([f"  {line}" for line in self.outcome.callout_lines])
        for table in self.tables:
            lines = list(table.lines(width))
            lines += [f"  {note}" for note in table.notes]
            if self.norms and table is self.norms[-1]:
                lines.append(f"  {LEGEND}")
            parts.append(lines)
        if self.events:
            parts.append(event_lines(self.events))
        return "\n\n".join("\n".join(lines) for lines in parts)

    @cached_property
    def tables(self) -> list[Table]:
        """Every table in the order of a reader: losses, norms by kind, and rules."""
        tables = [*self.loss_tables, *self.norms]
        if self.norms_title:
            tables.append(Table(self.norms_title, (), ()))
        if self.statuses:
            tables.append(self.rule_table)
        return tables

    @cached_property
    def loss_tables(self) -> list[Table]:
        """The tables of losses and learning rates."""
        series = [*self.losses, *self.rates]
        from gradsurgeon.report.losses import loss_tables  # noqa: PLC0415 # needs numpy

        return [table for table, _ in loss_tables(series)]

    @property
    def rule_table(self) -> Table:
        """What each rule did."""
        first, last = self.steps or (0, -1)
        updates = (last - first + 1) * max(1, len(self.ends))
        # No update of a rank that ended earlier was missed.
        updates -= sum(rank.behind for rank in self.progress)
        return rule_table(self.rules, self.statuses, self.events, updates)

    @property
    def _kinds(self) -> dict[str, str]:
        return {rule: info.kind for rule, info in self.rules.items()}

    @cached_property
    def history(self) -> History:
        """The norms, read once; a `GradSurgeonError` says that numpy is missing."""
        _needs_numpy()
        from gradsurgeon.report.history import History  # noqa: PLC0415 # needs numpy

        return History(of_lowest_ranks(self.series), self._kinds, self.params)

    @cached_property
    def ranks(self) -> str:
        """A sentence on replicas that differ, empty if none do."""
        from gradsurgeon.report.norms import ranks_that_differ  # noqa: PLC0415 # needs numpy

        return ranks_that_differ(self.series, self._kinds, are_replicas=self.are_replicas)

    @cached_property
    def norms(self) -> list[Table]:
        """The tables of norms, one for each kind of tensors."""
        history = self.history
        from gradsurgeon.report.norms import norm_tables  # noqa: PLC0415 # needs numpy

        return list(norm_tables(history))

    @property
    def norms_title(self) -> str:
        """The sentence that stands where no norm was recorded, empty if nobody asked for norms."""
        if self.norms:
            return ""
        stats = {statistic_of(part.key.stat) for part in self.series} - {LOSS, RATE}
        stats_of_losses = {series.stat for series in self.losses}
        if stats_of_losses and stats <= stats_of_losses:
            return ""
        recorded = printable(", ".join(sorted(stats)))
        if not recorded:
            logs_norms = any(rule.logged for rule in self.rules.values())
            recorded = "nothing yet" if logs_norms else NOTHING_RECORDED
        return f"norms: no l2 recorded; recorded: {recorded}"

    @cached_property
    def losses(self) -> list[LossSeries]:
        """What was recorded of losses: values, conflicts, and weights."""
        _needs_numpy()
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
    def tagged(self) -> list[LossSeries]:
        """The values of losses: tagged ones, and those that backward passes began from."""
        return [loss for loss in self.losses if loss.stat not in LOSS_STATS]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What stands out, a sentence each, faults first."""
        return self.outcome.remarks

    @cached_property
    def callouts(self) -> tuple[Callout, ...]:
        """What stands out in the records, which takes numpy, and the facts that checks saw, on all ranks once."""
        facts = dict.fromkeys([event.message for event in self.events if event.kind == "fact"])
        seen = [Callout("fact", text) for text in facts]
        if not is_installed("numpy"):
            return tuple(seen)
        from gradsurgeon.report.callouts import callouts  # noqa: PLC0415 # needs numpy
        from gradsurgeon.report.rate_facts import rate_facts  # noqa: PLC0415 # likewise

        if self.steps is not None:
            seen += rate_facts(self.series, self.steps[1])
        seen += callouts(self.history, len(self.params))
        if self.ranks:
            seen.append(Callout(REPLICAS, self.ranks))
        silent = self._silent()
        if silent:
            seen.append(Callout("silent", f"never got a gradient: {listed(silent)}"))
        return tuple(seen)

    @cached_property
    def tally(self) -> EventTally:
        """The kinds of events, and what traps and checks found."""
        return tally_of(self.events, edits_of(self.rules))

    @cached_property
    def ended(self) -> Ending | None:
        """How the run ended, `None` for a session."""
        if not self.ends:
            return None
        return ending_of(self.ends, self.tally)

    @cached_property
    def outcome(self) -> Outcome:
        """The band, what was found, and facts."""
        is_pack = self.title.startswith(packs.PREFIX)
        return outcome_of(self.ended, self.tally, self.callouts, is_pack=is_pack)

    @property
    def is_partial(self) -> bool:
        """Whether older rows are left out."""
        return bool(self.dropped) or any(series.skipped for series in self.series)

    def _silent(self) -> list[str]:
        """Return the parameters that should learn and had no gradient in any update."""
        if self.is_partial:
            return []  # the rows that are gone may have had a gradient
        logged = logged_params(self.rules, self.statuses)
        logged -= self.frozen.keys()
        for kind, name in self.history.shown:
            if kind == GRADIENT:
                logged.discard(name)
        return [name for name in self.params if name in logged]

    @property
    def frozen_note(self) -> str:
        """A sentence on parameters with `requires_grad` off, empty if there are none."""
        frozen = set(self.frozen)
        if is_installed("numpy"):
            # A parameter that learns later has norms.
            frozen -= {name for _, name in self.history.shown}
        if not frozen:
            return ""
        names = sorted(frozen, key=lambda name: (-self.frozen[name], name))
        return f"requires_grad off: {count(len(names), 'parameter')}, largest {listed(names)}"

    @property
    def head(self) -> list[str]:
        """The first lines: how the run ended, what was run, and how far it came."""
        text = "no step seen"
        if self.steps is not None:
            first, last = self.steps
            text = f"steps {first}..{last}"
        kinds = by_kind(self.events)
        text += f", {count(kinds.total(), 'event')}"
        if kinds:
            counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
            text += f" ({counts})"
        notes = [text]
        if self.dropped:
            notes.append(f"{count(self.dropped, 'row')} dropped, the oldest: memory is bounded")
        notes += self.notes
        if self.frozen_note:
            notes.append(self.frozen_note)
        text = "; ".join(map(printable, notes))
        return [*self.outcome.top, f"summary: {printable(self.title)}: {text}"]

    @cached_property
    def progress(self) -> list[RankProgress]:
        """How far each rank of a run directory came."""
        return progress_of(self.series, self.ends)

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


def _needs_numpy() -> None:
    library("numpy", "report", "a report of recorded norms")
