"""A trap of a user's own, with a kind of event and an error of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon import Decision, TrapError, TrapRule


class LongError(TrapError):
    """A gradient was too long."""


@dataclass(frozen=True, slots=True)
class TooLong(Decision):
    """Stops gradients that are too long."""

    kind: ClassVar = "check"
    error: ClassVar = LongError


class LengthTrap(TrapRule):
    """Stop gradients that are too long."""

    action: Literal["length-trap"] = "length-trap"
    limit: Annotated[float, Field(ge=0, description="The longest that is let through.")]

    def compile(self) -> Decision:
        return TooLong("l1", lambda lengths: lengths > self.limit, self.then, self.give_up_after)
