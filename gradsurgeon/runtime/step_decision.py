"""What becomes of one update."""

from __future__ import annotations

from dataclasses import dataclass

from gradsurgeon.actions import Rule, TrapRule
from gradsurgeon.errors import NonFiniteGradientError
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


def then_of(rule: Rule) -> str:
    """Return what a trap does to a step; empty for a rule that decides on none."""
    return rule.then if isinstance(rule, TrapRule) else ""
