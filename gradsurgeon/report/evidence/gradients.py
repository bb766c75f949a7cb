"""The gradients of a table as the rules before have left them: norms, and what is hidden. Needs numpy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradsurgeon.actions import Rule
from gradsurgeon.actions._ramps import Ramp
from gradsurgeon.report.evidence.run_norms import Array, RecordedTable


@dataclass(frozen=True)
class MatchedGradients:
    """The input of one rule in each row of a table: arrays of shape ``[n, names]`` for the gradients that it matches.

    Attributes:
        names: the gradients.
        steps: the update of each row, int64 ``[n]``.
        due: which gradients are there, in the steps of the rule. Of a spike or a norm over several, one that a `freeze` hides
            is no part.
        stats: the statistics, float32.
    """

    names: Sequence[str]
    steps: Array
    due: Array
    stats: Mapping[str, Array]

    @property
    def norms(self) -> Array:
        """The norms, or losses."""
        return self.stats["l2"]

    def number(self, rule: Rule, option: str) -> Array:
        """Return the number of an option in each row, float32 ``[n, 1]``."""
        number = getattr(rule, option)
        values = np.full((len(self.steps), 1), np.nan, np.float32)
        for row, step in enumerate(self.steps.tolist()):
            values[row] = (
                number.value(step, rule.steps.from_) if isinstance(number, Ramp) else number
            )
        return values


class TrialOutcome(NamedTuple):
    """The effect of a rule in the rows of a table, each array of shape ``[n, names]``.

    Attributes:
        acted: which gradients it changes, or which make it trip.
        strength: norm over bound, ``None`` if the rule has no bound.
        factors: by what it multiplies, ``None`` if it leaves gradients as they are.
        unknown: of which gradients the records do not tell.
        compared: by name, what the rule compares with its bound, float ``[n]``, NaN where nothing is.
        acts_at: whether it acts on numbers that it compares with a bound.
    """

    acted: Array
    strength: Array | None = None
    factors: Array | None = None
    unknown: Array | bool = False
    compared: Mapping[str, Array] = {}
    acts_at: Callable[[Array, float], Array] = np.greater


class View:
    """A table while rules act on it.

    Attributes:
        table: the records.
        stats: each statistic as the rules so far have left it.
        hidden: which gradients a `freeze` hides in their update.
        spoilt: by column, the rule whose effect norms do not show.
    """

    def __init__(self, table: RecordedTable) -> None:
        self.table = table
        self.stats = table.stats
        self.hidden = np.zeros_like(table.present)
        self.spoilt: dict[int, str] = {}
        self.hand_over()

    def hand_over(self) -> None:
        """Begin with the rules at the update."""
        self._stats_before = self.stats
        self._spoilt_before = {**self.spoilt}

    def gradients(self, rule: Rule, columns: Sequence[int]) -> MatchedGradients:
        stats = self.stats
        if rule.judges_first:
            # It judges what the script hands over, whatever rules above do.
            stats = self._stats_before
        steps = self.table.steps
        in_schedule = np.array(list(map(rule.steps.includes, steps.tolist())), bool)
        due = self.table.present[:, columns] & in_schedule[:, None]
        if rule.joins_norms or rule.judges_first:
            due &= ~self.hidden[:, columns]
        return MatchedGradients(
            names=[self.table.names[column] for column in columns],
            steps=steps,
            due=due,
            stats={stat: values[:, columns] for stat, values in stats.items()},
        )

    def spoiler(self, rule: Rule, columns: Sequence[int]) -> str:
        """Return the rule because of which nobody knows what another one gets; empty if there is none."""
        spoilt = self.spoilt
        if rule.judges_first:
            spoilt = self._spoilt_before
        return next((spoilt[column] for column in columns if column in spoilt), "")

    def leave(self, rule: Rule, columns: Sequence[int], outcome: TrialOutcome) -> None:
        """Go on with what a rule leaves. Gradients that it does not change stay as they are."""
        if outcome.factors is None:
            if rule.edits:
                self.spoil(np.array(columns)[np.any(outcome.acted, axis=0)].tolist(), rule.id)
            return
        self.stats = {stat: values.copy() for stat, values in self.stats.items()}
        for values in self.stats.values():
            with np.errstate(invalid="ignore", over="ignore"):
                multiplied = values[:, columns] * np.abs(outcome.factors)
            # A gradient that is set to zero has no NaN.
            values[:, columns] = np.where(outcome.factors == 0, np.float32(0), multiplied)

    def spoil(self, columns: Sequence[int], rule: str) -> None:
        for column in columns:
            self.spoilt.setdefault(column, rule)
