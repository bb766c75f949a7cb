"""The nested mappings of a rule: its schedule, its conditions, its assertion."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gradsurgeon.actions._fields import Dtype, Flaw, Glob, flawed, is_whole
from gradsurgeon.actions._strictness import Stricter


class Options(BaseModel):
    """A mapping of a rule file. Strict, frozen, and without keys that it does not know."""

    # Strict, because lax mode reads `max: on` as 1.0; frozen, because a plan holds these values.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True
    )

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        """Yield what no single field can see, from the raw options.

        It reads raw options rather than validated ones, so that a file shows these flaws in the same
        pass as a misspelt key beside them; it must bear options of any type.
        """
        del given
        return iter(())

    @model_validator(mode="after")
    def _no_flaws(self) -> Self:
        fields = type(self).model_fields
        given = {info.alias or name: getattr(self, name) for name, info in fields.items()}
        if flaws := tuple(self.flaws(given)):
            raise flawed(*flaws)
        return self


class Steps(Options):
    """When a rule acts, in updates of the optimizer that owns the parameter."""

    from_: Annotated[int, Field(alias="from", ge=0, description="First step, inclusive.")] = 0
    to: Annotated[int | None, Field(ge=1, description="Last step, exclusive.")] = None
    every: Annotated[
        int, Field(ge=1, description="Act on every n-th step, counted from `from`.")
    ] = 1

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        start, stop = given.get("from", 0), given.get("to")
        if is_whole(start) and is_whole(stop) and 0 < stop <= start:
            message = f"the schedule is empty: `to` ({stop}) is not after `from` ({start})"
            yield Flaw("to", message, "`to` is exclusive: make it larger than `from`")

    @property
    def always(self) -> bool:
        return self.from_ == 0 and self.to is None and self.every == 1

    def due(self, step: int) -> bool:
        after = step - self.from_
        return after >= 0 and (self.to is None or step < self.to) and after % self.every == 0

    def alike_until(self, step: int) -> int:
        """Return the first step after this one that may differ from it in whether the rule is due."""
        last = sys.maxsize if self.to is None else self.to
        if step < self.from_:
            return self.from_
        if step >= last:
            return sys.maxsize
        # Due or not, the next multiple is where that can change; every step is one where `every` is 1.
        after = (step - self.from_) % self.every
        if self.every == 1:
            return last
        return step + 1 if after == 0 else min(last, step - after + self.every)

    def includes(self, other: Steps) -> bool:
        """Tell whether all steps of another schedule are steps of this one."""
        last = (
            None if other.to is None else other.to - 1 - (other.to - 1 - other.from_) % other.every
        )
        if last == other.from_:
            return self.due(last)
        if not self.due(other.from_) or other.every % self.every:
            return False
        return self.to is None if last is None else self.due(last)

    def meets(self, other: Steps) -> bool:
        first, second = sorted((self, other), key=lambda steps: steps.from_)
        common = math.gcd(first.every, second.every)
        gap = second.from_ - first.from_
        if gap % common:
            return False
        # The smallest number of periods of the later one after which the earlier one is due, too.
        period = first.every // common
        turns = (-gap // common) * pow(second.every // common, -1, period) % period
        step = second.from_ + turns * second.every
        return first.due(step) and second.due(step)


class Numel(Options):
    """Bounds on the number of elements, both inclusive."""

    min: Annotated[int | None, Field(ge=0, description="At least so many.")] = None
    max: Annotated[int | None, Field(ge=0, description="At most so many.")] = None

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        low, high = given.get("min"), given.get("max")
        if is_whole(low) and is_whole(high) and 0 <= high < low:
            yield Flaw("min", f"min ({low}) is greater than max ({high})", "exchange them")


class Where(Options):
    """Conditions beside the name; all that are given must hold."""

    module_type: Annotated[
        Glob | None,
        Field(description="Glob over the class names of the owning module, base classes included."),
    ] = None
    ndim: Annotated[int | None, Field(ge=0, description="Number of dimensions.")] = None
    dtype: Annotated[Dtype | None, Field(description="Such as float32 or bfloat16.")] = None
    numel: Annotated[Numel | None, Field(description="Bounds on the number of elements.")] = None
    requires_grad: Annotated[bool | None, Field(description="Trainable when binding.")] = None


class Expect(Options):
    """An assertion on what the rule binds, checked whenever it is bound."""

    params: Annotated[
        int,
        Field(ge=0, description="Exact number of distinct parameters."),
        Stricter(tightened="it is checked now", loosened="it is no longer checked"),
    ]
