"""Which change of an option makes a rule stricter: metadata of a field, read by reviews."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["tightened", "loosened", "changed"]


@dataclass(frozen=True, slots=True)
class Stricter:
    """What makes one value of an option stricter than another: part of the annotation of its field.

    ``max_norm: Annotated[float, Field(ge=0), Stricter(operator.neg)]``: the smaller, the stricter. A
    value that is given is always stricter than none.

    Attributes:
        rank: maps a value to a number that is larger the stricter the value is. Without it two values
            that are both given cannot be compared.
        tightened: what a stricter value means where the word alone does not tell, may be empty.
        loosened: the same of a value that is less strict.
        incomparable: says why two values cannot be compared; empty where they can.
        default: the value that one not given stands for, ``None`` where it stands for no bound.
        one_of_several: where it is not given another option is, with which it cannot be compared.
    """

    rank: Callable[[Any], float] | None = None
    tightened: str = ""
    loosened: str = ""
    incomparable: Callable[[Any, Any], str] | None = None
    default: Any = None
    one_of_several: bool = False

    def compare(self, before: Any, after: Any) -> tuple[Direction, str]:
        """Return whether the new of two different values is stricter, and what that means."""
        before, after = (self.default if value is None else value for value in (before, after))
        if before is None or after is None:
            if self.one_of_several:
                return "changed", ""
            stricter = before is None
        elif self.incomparable is not None and (reason := self.incomparable(before, after)):
            return "changed", reason
        elif self.rank is None or self.rank(before) == self.rank(after):
            return "changed", ""
        else:
            stricter = self.rank(after) > self.rank(before)
        return ("tightened", self.tightened) if stricter else ("loosened", self.loosened)
