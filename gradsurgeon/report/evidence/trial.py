"""Tries rules on the recorded norms of a run that did not have them: in which updates each would have acted. Needs numpy."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gradsurgeon.actions import FreezeRule, Rule, TrapRule, in_order
from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.actions.spike_trap import SpikeTrap
from gradsurgeon.common.match import compile_pattern, select
from gradsurgeon.errors import shorten_names
from gradsurgeon.language.planning import MatchedRules
from gradsurgeon.records.store.memory import LOSS
from gradsurgeon.report.evidence import counts
from gradsurgeon.report.evidence.gradients import TrialOutcome, View
from gradsurgeon.report.evidence.outcomes import BOUNDING, OUTCOMES, stats_of, untold
from gradsurgeon.report.evidence.run_norms import DECISION, RecordedTable, RunNorms
from gradsurgeon.report.evidence.told import Told

_OPEN = "its bound is `?`"
_OTHERS = "only rules on gradients of parameters before the update are tried, and rules on losses"
_NO_LOSS = "the run recorded no loss of this name"
_UNRECORDED = "no {stat} at `{point}` of {names}: {remedy}"
_RECORD = "record `{stat}` with `norm-log` and `at: {point}`"
_FIRST = "rule {rule} of the run acted before `norm-log` at `step`: put the `norm-log` above it"
_AT_STEP = "record the gradients with `norm-log` and `at: step`"
_SCRIPT = "the script changed gradients between backward and the update"
_UNSEEN = (
    "no trap of the run saw whether the script changed gradients between backward and the update"
)
_EDITED = "rule {rule} of the run changed what backward passes contribute"
_SEVERAL = "several rules recorded these gradients: record those of one norm by one rule"
_LEARNS = "its bound learns from each update, and "
_QUANTILES = f"{_LEARNS}this export has quantiles: name the run directory"
_SAMPLED = f"{_LEARNS}the run recorded one in {{period}}: record all"
_LATE = f"{_LEARNS}the run recorded none before {{step}}: record all"
_BEHIND = "rule {rule} acts on these gradients before, and what it leaves is not known"


class Trial:
    """A trial of rules on the recorded norms of a run.

    Args:
        rules: the rules of a file and the parameters that each matches; earlier rules change what later ones see.
        run: the recorded norms.
        open_bounds: with thresholds, for which a number for each gradient and update is kept: the rules without a bound yet.
            They change nothing, and only their thresholds are told.
    """

    def __init__(
        self, rules: MatchedRules, run: RunNorms, open_bounds: frozenset[str] | None = None
    ) -> None:
        self._run = run
        self._matches = rules.matches
        self._open = open_bounds
        self._compared: dict[str, list[tuple[RecordedTable, TrialOutcome]]] = defaultdict(list)
        self._told: dict[str, Told] = {}
        self._stages: dict[str, list[Rule]] = defaultdict(list)
        for rule in in_order(rules.rules.values()):
            if not (rule.edits or isinstance(rule, TrapRule | FreezeRule)):
                continue
            stage = _stage_of(rule)
            self._stages[stage].append(rule)
            self._told[rule.id] = Told(
                run=run.name,
                missing=self._problem(rule, stage),
                bites=rule.edits and isinstance(rule, BOUNDING),
                is_rounded=run.is_rounded,
                is_of_one_rank=run.ranks > 1 and stage in (LOSS, "backward"),
            )

    def told(self) -> dict[str, Told]:
        """Return what each rule that acts would have done, by rule."""
        backward = self._stages["backward"]
        for stage in (LOSS, "backward", DECISION, "step"):
            before = backward if stage in (DECISION, "step") else ()
            for table in self._run.at(stage):
                self._try(table, self._stages[stage], before)
        for rule, told in self._told.items():
            if told.missing:
                continue
            told.thresholds = tuple(counts.thresholds(self._compared[rule]))
            if rule in (self._open or ()):
                told.missing = _OPEN
        return self._told

    def _problem(self, rule: Rule, stage: str) -> str:
        """Return why the records do not tell what a rule would have done; empty if they do."""
        if stage == "other":
            return _OTHERS
        tables = [table for table in self._run.at(stage) if self._columns(rule, table)]
        problem = untold(rule, is_open=rule.id in (self._open or ()))
        if stage != LOSS:
            problem = problem or self._doubt(rule, stage, tables)
            problem = problem or self._unrecorded(rule, stage, tables)
        elif not tables:
            problem = problem or _NO_LOSS
        return problem or self._unlearnt(rule, tables)

    def _doubt(self, rule: Rule, stage: str, tables: Sequence[RecordedTable]) -> str:
        """Return what a rule of the run, or its script, may have done to gradients; empty if nothing."""
        run = self._run
        changed = run.changed_by_script
        if run.edited_at_backward:
            return _EDITED.format(rule=run.edited_at_backward)
        # A `freeze` asks for no number.
        if run.at_update or changed is False or isinstance(rule, FreezeRule):
            return ""
        if stage == "step":
            return f"{_SCRIPT if changed else _UNSEEN}: {self._at_step}"
        for table in tables:
            nonfinite = table.present & ~np.isfinite(table.stats["l2"])
            if changed and stage == DECISION and nonfinite[:, self._columns(rule, table)].any():
                return f"{_SCRIPT}: {self._at_step}"
        return ""

    @property
    def _at_step(self) -> str:
        """What a run has to record to tell of the update."""
        if self._run.edited_first:
            return _FIRST.format(rule=self._run.edited_first)
        return _AT_STEP

    def _unrecorded(self, rule: Rule, stage: str, tables: Sequence[RecordedTable]) -> str:
        point = "accumulated" if stage == DECISION else stage
        # Others have no gradient.
        trained = {param.name for param in self._run.manifest.params if param.requires_grad}
        wanted = self._matches[rule.id].members & trained
        recorders = set()
        for stat in stats_of(rule):
            having: set[str] = set()
            for table in tables:
                if stat in table.stats:
                    having.update(table.names)
                    recorders.add(table.rule)
            lacking = sorted(wanted - having)
            if lacking:
                remedy = _RECORD.format(stat=stat, point=point)
                if point == "step" and self._run.edited_first:
                    remedy = self._at_step
                return _UNRECORDED.format(
                    stat=stat, point=point, names=shorten_names(lacking), remedy=remedy
                )
        if rule.joins_norms and len(recorders) > 1:
            return _SEVERAL
        return ""

    def _unlearnt(self, rule: Rule, tables: Sequence[RecordedTable]) -> str:
        """Return why a bound could not learn from these records; empty if it could."""
        if not isinstance(rule, SpikeTrap) or rule.above.norm is not None:
            return ""
        if self._run.is_rounded:
            return _QUANTILES
        for table in tables:
            # 0 for a single update.
            period = int(np.gcd.reduce(np.diff(table.steps)))
            if period > 1:
                return _SAMPLED.format(period=period)
            if not table.is_from_start and rule.steps.from_ < table.steps[0]:
                return _LATE.format(step=table.steps[0])
        return ""

    def _columns(self, rule: Rule, table: RecordedTable) -> list[int]:
        if rule.judges_losses:
            return select(list(map(compile_pattern, rule.patterns)), table.names)
        wanted = self._matches[rule.id].members
        return [column for column, name in enumerate(table.names) if name in wanted]

    def _try(self, table: RecordedTable, rules: Sequence[Rule], before: Sequence[Rule]) -> None:
        """Let rules act on a table, after rules that have acted on what backward passes contribute."""
        view = View(table)
        for rule in rules:
            if isinstance(rule, FreezeRule):
                columns = self._columns(rule, table)
                view.hidden[:, columns] |= view.gradients(rule, columns).due
        for rule in before:
            columns = self._columns(rule, table)
            if rule.linear and type(rule) in OUTCOMES:
                # What it leaves of a sum is the sum of what it leaves.
                outcome = OUTCOMES[type(rule)](rule, view.gradients(rule, columns))
                view.leave(rule, columns, outcome)
            else:
                view.spoil(columns, rule.id)
        view.hand_over()
        for rule in rules:
            columns = self._columns(rule, table)
            if columns:
                self._act(rule, view, columns)

    def _act(self, rule: Rule, view: View, columns: Sequence[int]) -> None:
        told = self._told[rule.id]
        spoiler = view.spoiler(rule, columns)
        if spoiler and not told.missing and not isinstance(rule, FreezeRule):
            told.missing = _BEHIND.format(rule=spoiler)
        if told.missing:
            if rule.edits:
                view.spoil(columns, rule.id)
            return
        gradients = view.gradients(rule, columns)
        outcome = OUTCOMES[type(rule)](rule, gradients)
        counts.add(told, view.table, gradients, outcome)
        if self._open is not None:
            self._compared[rule.id].append((view.table, outcome))
        if rule.id not in (self._open or ()):
            view.leave(rule, columns, outcome)


def _stage_of(rule: Rule) -> str:
    """Return the point of the records that show what a rule gets; `other` if none do."""
    if rule.judges_losses:
        return LOSS
    if rule.target != "params" or rule.point == "updated":
        return "other"
    if isinstance(rule, NanTrap):
        return DECISION
    if rule.point == "backward":
        return "backward"
    return "step"
