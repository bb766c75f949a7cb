"""Numbers of a rule that change with the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    Field,
    SerializeAsAny,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from gradsurgeon.actions._fields import Flaw, flawed
from gradsurgeon.actions._options import Options, read_options

# Ganin et al. (2016) anneal the factor of a gradient reversal so.
_STEEPNESS = 10.0


class Ramp(Options):
    """A number that goes from one value to another, over a number of updates."""

    from_: Annotated[float, Field(alias="from", description="The number before the first update.")]
    to: Annotated[float, Field(description="The number after `steps` updates, and for ever.")]
    steps: Annotated[int, Field(ge=1, description="Updates from the one number to the other.")]
    shape: Annotated[
        Literal["linear", "cosine", "sigmoid"], Field(description="How it goes there.")
    ] = "linear"
    start_step: Annotated[
        int | None,
        Field(
            ge=0, description="The update at which it begins; else `from` of the rule's `steps`."
        ),
    ] = None

    def begins(self, start: int) -> int:
        """Return the update at which it begins, for a rule whose schedule starts at one."""
        return start if self.start_step is None else self.start_step

    def described(self, start: int) -> str:
        start = self.begins(start)
        last = start + self.steps
        return (
            f"goes from {self.from_:g} to {self.to:g} in steps {start:,} to {last:,} ({self.shape})"
        )

    def value(self, step: int, start: int) -> float:
        """Return the number at an update of a rule whose schedule starts at another one."""
        progress = max(0, step - self.begins(start)) / self.steps
        if progress >= 1.0:
            return self.to
        share = progress
        if self.shape == "cosine":
            share = (1.0 - math.cos(math.pi * progress)) / 2.0
        elif self.shape == "sigmoid":
            share = 2.0 / (1.0 + math.exp(-_STEEPNESS * progress)) - 1.0
        return self.from_ + (self.to - self.from_) * share


def ends(number: float | Ramp) -> tuple[float, float]:
    """Return the first and the last value of a number."""
    if isinstance(number, Ramp):
        return number.from_, number.to
    return number, number


def fixed(number: float | Ramp) -> float:
    """Return the number of a rule of one update, which has no ramps."""
    assert not isinstance(number, Ramp)  # noqa: S101 # `EditRule.in_step` has replaced them
    return number


def _reader(least: float) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Return a validator of numbers and ramps that do not go below a number."""

    def read(value: Any, number: ValidatorFunctionWrapHandler) -> Any:
        ramp = value
        if isinstance(value, Mapping):
            ramp, flaws = read_options(Ramp, value)
            if flaws:
                raise flawed(*flaws)
        if not isinstance(ramp, Ramp):
            return number(value)
        for key, end in zip(("from", "to"), ends(ramp), strict=True):
            if end < least:
                raise flawed(Flaw(key, f"`{key}` must be at least {least:g}", "correct it"))
        return ramp

    return read


_SCHEMA = {
    "type": "object",
    "properties": {
        "from": {"type": "number"},
        "to": {"type": "number"},
        "steps": {"type": "integer", "minimum": 1},
        "shape": {"enum": ["linear", "cosine", "sigmoid"]},
        "start_step": {"type": "integer", "minimum": 0},
    },
    "required": ["from", "to", "steps"],
    "additionalProperties": False,
}
_ANY = {"anyOf": [{"type": "number"}, _SCHEMA]}
_FROM_0 = {"anyOf": [{"type": "number", "minimum": 0}, _SCHEMA]}

if TYPE_CHECKING:
    Number: TypeAlias = float | Ramp
    NumberFrom0: TypeAlias = float | Ramp
else:
    # Else pydantic warns of each ramp that it writes.
    Number = SerializeAsAny[
        Annotated[float, WrapValidator(_reader(-math.inf)), WithJsonSchema(_ANY)]
    ]
    NumberFrom0 = SerializeAsAny[
        Annotated[float, Field(ge=0), WrapValidator(_reader(0.0)), WithJsonSchema(_FROM_0)]
    ]
