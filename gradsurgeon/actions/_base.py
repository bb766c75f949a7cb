"""What every rule has in common: its selection, its schedule, and the contract of an action.

One file beside this one defines one action: a subclass of `Rule` with the options, the examples and
the arithmetic. The file is found by itself; `gradsurgeon.actions` keeps no list. Nothing here or
there imports torch before a rule is compiled, because linting a rule file must not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gradsurgeon.actions._fields import (
    Dtype,
    Flaw,
    Glob,
    Patterns,
    RuleId,
    flawed,
    is_whole,
)
from gradsurgeon.match import Pattern, compile_pattern

if TYPE_CHECKING:
    from torch import Tensor

Point = Literal["backward", "accumulated", "step"]
Role = Literal["edit", "observe", "trap"]
POINTS: tuple[Point, ...] = ("backward", "accumulated", "step")


@dataclass(frozen=True, slots=True)
class Example:
    """What an action does to one gradient: documentation, test and proof at once.

    Exactly one of ``expect`` (an edited gradient), ``record`` (statistics) and ``trips`` is given.
    """

    options: Mapping[str, Any]
    grad: Sequence[float]
    expect: Sequence[float] | None = None
    record: Mapping[str, float] | None = None
    trips: bool | None = None


@dataclass(frozen=True, slots=True)
class Edit:
    """The compiled form of an editing action.

    Attributes:
        apply: maps a strided gradient to a new one of the same shape, dtype and device, out of place,
            because autograd may hand one tensor to several consumers.
        apply_: the same in place on many gradients that nobody else holds.
        alters: tells, as a 0-dim bool tensor on the gradient's device, whether ``apply`` would change
            an element. It never waits for the device.
    """

    apply: Callable[[Tensor], Tensor]
    apply_: Callable[[Sequence[Tensor]], None]
    alters: Callable[[Tensor], Tensor]


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
            raise flawed(*flaws, together=True)
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
        """Yield the flaw of a schedule that never comes."""
        start, stop = given.get("from", 0), given.get("to")
        if is_whole(start) and is_whole(stop) and 0 < stop <= start:
            message = f"the schedule is empty: `to` ({stop}) is not after `from` ({start})"
            yield Flaw("to", message, "`to` is exclusive: make it larger than `from`")

    def due(self, step: int) -> bool:
        """Tell whether the rule acts in ``step``."""
        after = step - self.from_
        return after >= 0 and (self.to is None or step < self.to) and after % self.every == 0


class Numel(Options):
    """Bounds on the number of elements, both inclusive."""

    min: Annotated[int | None, Field(ge=0, description="At least so many.")] = None
    max: Annotated[int | None, Field(ge=0, description="At most so many.")] = None

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        """Yield the flaw of bounds that exclude everything."""
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

    params: Annotated[int, Field(ge=0, description="Exact number of distinct parameters.")]


class Rule(Options):
    """One rule: which tensors, at which moment, and (in the subclass) what to do with them."""

    role: ClassVar[Role] = "edit"
    # The points at which the action may stand; the first is the default unless `at` must be given.
    points: ClassVar[tuple[Point, ...]] = ("backward", "step")
    needs_at: ClassVar[bool] = False
    takes_at: ClassVar[bool] = True
    # Options of which at least one must be given.
    either: ClassVar[tuple[str, ...]] = ()
    EXAMPLES: ClassVar[tuple[Example, ...]] = ()

    id: Annotated[RuleId, Field(description="Unique name of the rule, kebab-case.")]
    action: Annotated[str, Field(description="What the rule does.")]
    params: Annotated[
        Patterns, Field(description="Patterns of parameter names; `*` crosses dots. Always quoted.")
    ]
    tensor: Annotated[Literal["grad"], Field(description="The gradient of the parameter.")] = "grad"
    exclude: Annotated[Patterns, Field(description="Patterns of names that are left out.")] = ()
    where: Annotated[Where, Field(description="Conditions beside the name.")] = Where()
    at: Annotated[Point | None, Field(description="The moment at which the rule acts.")] = None
    steps: Annotated[Steps, Field(description="The steps in which the rule acts.")] = Steps()
    expect: Annotated[Expect | None, Field(description="Assertion on what is bound.")] = None
    optional: Annotated[bool, Field(description="Matching nothing is no error.")] = False

    @property
    def point(self) -> Point:
        """The moment at which the rule acts, the default of its action filled in."""
        return self.at or self.points[0]

    @property
    def keeps_zero(self) -> bool:
        """Whether a zero stays a zero.

        Then acting on the stored values of a sparse gradient is acting on the gradient.
        """
        return True

    @property
    def may_overflow(self) -> bool:
        """Whether a finite gradient can come out non-finite."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan must know about the rule, beyond what it matched."""
        return ()

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The compiled patterns of the names the rule selects."""
        return tuple(compile_pattern(text) for text in self.params)

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        """Yield the flaws of `at`; actions add those of their options."""
        at = given.get("at")
        if not cls.takes_at:
            if at is not None:
                message = f"{cls.name()} takes no `at`: {cls.no_at_reason()}"
                yield Flaw("at", message, "remove it", key=True, check="unknown-key")
        elif at is None:
            if cls.needs_at:
                yield Flaw(
                    "at",
                    f"missing key `at`: {cls.name()} has no default, because its meaning differs",
                    "`at: step` bounds the final gradient, `at: backward` the contribution of each "
                    "backward pass",
                    missing=True,
                    check="missing-key",
                )
        elif isinstance(at, str) and at in POINTS and at not in cls.points:
            reason = (
                "an edit of accumulated gradients would compound over micro-batches"
                if at == "accumulated"
                else "it is not a point of this action"
            )
            hint = " or ".join(f"`at: {point}`" for point in cls.points)
            yield Flaw("at", f"{cls.name()} cannot act at `{at}`: {reason}", f"use {hint}")

    @classmethod
    def name(cls) -> str:
        """Return the name of the action, as written in a rule file."""
        return str(cls.model_fields["action"].default)

    @classmethod
    def no_at_reason(cls) -> str:
        """Return why the action takes no ``at``."""
        return ""

    def complex_problem(self) -> str:
        """Return why the rule cannot act on complex gradients; empty where it can."""
        return ""

    def compile(self) -> Edit:
        """Return the arithmetic of an editing rule. Needs torch; called once per session."""
        raise TypeError(f"{self.name()} does not edit")
