"""The kinds of actions. Each action is a class derived from one of them.

What a rule does to training follows from its kind, and in detail from what its `compile` returns.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from gradsurgeon.actions._base import Point, Role, Rule
from gradsurgeon.actions._effects import Copies, Decision, Edit, Hidden, Observer, Spikes, Then
from gradsurgeon.actions._strictness import Stricter
from gradsurgeon.actions._target import TargetKind

_READING: tuple[Point, ...] = ("accumulated", "backward", "step")


class EditRule(Rule):
    """A rule that changes what it matches."""

    role: ClassVar[Role] = "edit"

    @abstractmethod
    def compile(self) -> Edit:
        """Return the arithmetic. Needs torch; called once per session."""


class ObserverRule(Rule):
    """A rule that records numbers and changes nothing: those that the attribute ``stats`` names."""

    role: ClassVar[Role] = "observe"
    points: ClassVar[tuple[Point, ...]] = _READING

    if TYPE_CHECKING:  # an option of some actions, a constant of others

        @property
        def stats(self) -> tuple[str, ...]: ...

    def compile(self) -> Observer:
        """Return what is recorded."""
        return Observer(tuple(self.stats))


class TrapRule(Rule):
    """A rule that decides right before an update whether it takes place."""

    role: ClassVar[Role] = "trap"
    points: ClassVar[tuple[Point, ...]] = ("accumulated",)
    takes_at: ClassVar[bool] = False

    then: Annotated[
        Then,
        Field(description="What happens to the step."),
        Stricter(("warn", "skip-step", "raise").index),
    ] = "raise"
    give_up_after: Annotated[
        int,
        Field(ge=1, description="Raise after this many trips in a row, whatever `then` says."),
        Stricter(operator.neg, "stops sooner", "stops later"),
    ] = 10

    @abstractmethod
    def compile(self) -> Decision | Spikes:
        """Return what is asked of the gradients."""

    @classmethod
    def no_at_reason(cls) -> str:
        return "it looks after each backward pass and decides right before the update"


class CaptureRule(Rule):
    """A rule that keeps copies of tensors."""

    role: ClassVar[Role] = "capture"
    points: ClassVar[tuple[Point, ...]] = _READING

    max_bytes: Annotated[
        int, Field(ge=1, description="Bytes kept in all; the oldest copies make room.")
    ] = 256 * 2**20

    def compile(self) -> Copies:
        """Return how much is kept."""
        return Copies(self.max_bytes)


class FreezeRule(Rule):
    """A rule that hides gradients from the optimizer."""

    role: ClassVar[Role] = "freeze"
    targets: ClassVar[tuple[TargetKind, ...]] = ("params",)
    points: ClassVar[tuple[Point, ...]] = ("step",)

    def compile(self) -> Hidden:
        """Return that the gradient is hidden."""
        return Hidden()
