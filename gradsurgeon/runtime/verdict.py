"""What the traps know of one update, and what they say about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.errors import NonFiniteGradientError
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import Count
from gradsurgeon.runtime.ranks import Word
from gradsurgeon.runtime.state import Mode


@dataclass(slots=True)
class Verdict:
    """What the traps say about one update."""

    skip: bool = False
    error: NonFiniteGradientError | None = None
    # Parameters that a `freeze` rule hides from the optimizer in this step.
    frozen: tuple[int, ...] = ()
    # What led to it, for ranks that have seen nothing.
    word: Word | None = None
    # Where the device has the last word: whether to skip, to be told to the optimizer.
    flag: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision rests on.

    Attributes:
        before: tensors that were certainly non-finite at the last look after backward.
        now: tensors that are at the update, with what kind and how many elements, counted exactly.
        unchanged: the norms of all gradients are what they were at that look.
    """

    before: frozenset[int]
    now: dict[int, Count]
    unchanged: bool = False


@dataclass(slots=True)
class Watch:
    """The looks of the current step of one clock, and how often each trap tripped in a row."""

    looks: list[Look] = field(default_factory=list)
    in_a_row: dict[str, int] = field(default_factory=dict)
    scaled_away: int = 0


def outcome(rule: NanTrap, mode: Mode, then: str, in_a_row: int) -> str:
    """Return what becomes of a step in which a trap has tripped."""
    if mode == "observe":
        return f"observing only: `then: {rule.then}` would have acted"
    if then != rule.then:
        return f"giving up: tripped {in_a_row} times in a row (give_up_after: {rule.give_up_after})"
    return {
        "raise": "stopped before the update: no weight was moved",
        "skip-step": "step skipped: no weight and no optimizer state was touched",
        "warn": "the update goes on (`then: warn`): expect non-finite weights",
    }[then]
