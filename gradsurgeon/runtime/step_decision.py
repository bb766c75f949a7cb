"""What becomes of one update, and of a trap that has tripped before it."""

from __future__ import annotations

from dataclasses import dataclass

from gradsurgeon.actions import Decision, Rule, TrapRule
from gradsurgeon.errors import NonFiniteGradientError
from gradsurgeon.runtime.context import Mode
from gradsurgeon.runtime.nonfinite_report import TrapReport
from gradsurgeon.runtime.ranks import Cause

# How bad it is for a step, from what all ranks agree on the worst.
FINE, OVERFLOWED, SKIP, RAISE = range(4)


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What becomes of one update.

    Attributes:
        skip: the optimizer must touch nothing.
        error: to raise before any weight moves.
        frozen: parameters that a `freeze` rule hides from the optimizer in this step.
        cause: what led to it, for ranks that have seen nothing.
    """

    skip: bool = False
    error: NonFiniteGradientError | None = None
    frozen: tuple[int, ...] = ()
    cause: Cause | None = None


def decided(severity: int, cause: Cause, step: int) -> StepDecision:
    """Return the decision to skip or to raise."""
    if severity < RAISE:
        return StepDecision(skip=True, cause=cause)
    return StepDecision(error=cause.error(step), cause=cause)


def then_of(rule: Rule) -> str:
    """Return what a trap does to a step; empty for a rule that decides on none."""
    return rule.then if isinstance(rule, TrapRule) else ""


@dataclass(frozen=True, slots=True)
class Trip:
    """A trap that has tripped: what it reports, and how often it has done so in a row."""

    rule: str
    decision: Decision
    in_a_row: int
    report: TrapReport

    @property
    def then(self) -> str:
        gives_up = self.in_a_row >= self.decision.give_up_after
        return "raise" if gives_up else self.decision.then

    @property
    def severity(self) -> int:
        return {"raise": RAISE, "skip-step": SKIP, "warn": FINE}[self.then]

    def outcome(self, mode: Mode) -> str:
        """Return what becomes of the step, as a line of the report."""
        if mode == "observe":
            return f"observing only: `then: {self.decision.then}` would have acted"
        if self.then != self.decision.then:
            return (
                f"giving up: tripped {self.in_a_row} times in a row "
                f"(give_up_after: {self.decision.give_up_after})"
            )
        return {
            "raise": "stopped before the update: no weight was moved",
            "skip-step": "step skipped: no weight and no optimizer state was touched",
            "warn": "the update goes on (`then: warn`)" + self.report.expect,
        }[self.then]
