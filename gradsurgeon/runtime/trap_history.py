"""How often in a row traps have tripped, and what follows from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import cast

from gradsurgeon.actions import Rule, TrapRule
from gradsurgeon.runtime.context import Mode
from gradsurgeon.runtime.nonfinite_report import TrapReport
from gradsurgeon.runtime.step_decision import FINE, RAISE, SKIP


@dataclass(frozen=True, slots=True)
class Trip:
    """A trap that has tripped, before the ranks have said which of them had a part in it.

    Attributes:
        rule: the trap.
        step: the update that it holds up.
        in_a_row: how often it has tripped in a row.
        finding: what it reports.
        guilty: whether this rank contributed what is not finite to an average.
    """

    rule: TrapRule
    step: int
    in_a_row: int
    finding: TrapReport
    guilty: bool = False

    @property
    def then(self) -> str:
        return "raise" if self.in_a_row >= self.rule.give_up_after else self.rule.then

    @property
    def severity(self) -> int:
        return {"raise": RAISE, "skip-step": SKIP, "warn": FINE}[self.then]

    def outcome(self, mode: Mode) -> str:
        """Return what becomes of the step, as a line of the report."""
        rule = self.rule
        if mode == "observe":
            return f"observing only: `then: {rule.then}` would have acted"
        if self.then != rule.then:
            return (
                f"giving up: tripped {self.in_a_row} times in a row "
                f"(give_up_after: {rule.give_up_after})"
            )
        return {
            "raise": "stopped before the update: no weight was moved",
            "skip-step": "step skipped: no weight and no optimizer state was touched",
            "warn": "the update goes on (`then: warn`)" + self.finding.expect,
        }[self.then]

    def because(self, why: str) -> Trip:
        """Return the same with a report that begins with the reason."""
        return replace(self, finding=replace(self.finding, head=why + self.finding.head))


@dataclass(slots=True)
class TrapHistory:
    """How often in a row the traps of one clock have tripped, and its scaler has skipped a step."""

    in_a_row: Counter[str] = field(default_factory=Counter)
    scaler_skips: int = 0

    def trip(self, rule: Rule, step: int, finding: TrapReport, *, guilty: bool = False) -> Trip:
        self.in_a_row[rule.id] += 1
        return Trip(cast("TrapRule", rule), step, self.in_a_row[rule.id], finding, guilty)

    def clear(self, rule: Rule) -> None:
        self.in_a_row[rule.id] = 0

    def give_up(self, rule: Rule) -> None:
        """Let the next trip be one too many, as those after it, until the trap finds nothing."""
        patience = cast("TrapRule", rule).give_up_after
        self.in_a_row[rule.id] = max(self.in_a_row[rule.id], patience - 1)

    def is_stuck(self, rule: Rule) -> bool:
        """Tell whether a scaler has skipped as many steps in a row as a trap puts up with."""
        return self.scaler_skips >= cast("TrapRule", rule).give_up_after
