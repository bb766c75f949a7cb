"""What every rule has in common: its selection, its schedule, and the contract of an action.

One file beside this one defines one action: a class derived from one of `_kinds`, with the options, the
examples and what it compiles to. The file is found by itself; `gradsurgeon.actions` keeps no list. Nothing
here or there imports torch before a rule is compiled, because linting a rule file must not need it.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._effects import Effect
from gradsurgeon.actions._fields import Flaw, Glob, Patterns, RuleId, Stricter
from gradsurgeon.actions._options import Expect, Options, Steps, Where
from gradsurgeon.actions._target import (
    TARGETS,
    TargetKind,
    TensorRef,
    parse_tensor,
    target_flaws,
)
from gradsurgeon.match import Pattern, compile_pattern

Point = Literal["backward", "accumulated", "step"]
Moment = Literal["forward", "backward", "accumulated", "step"]
Role = Literal["edit", "observe", "trap", "capture", "freeze"]
POINTS: tuple[Point, ...] = ("backward", "accumulated", "step")
MOMENTS: tuple[Moment, ...] = ("forward", *POINTS)

# Every action whose class has been defined, by name: those of gradsurgeon, and a user's own.
known_actions: dict[str, type[Rule]] = {}


@dataclass(frozen=True, slots=True)
class Example:
    """What an action does to one gradient, or to those of ``losses``: documentation, test and proof at once.

    Exactly one of ``expect`` (an edited gradient), ``record`` (statistics) and ``trips`` is given.
    """

    options: Mapping[str, Any]
    grad: Sequence[float] = ()
    expect: Sequence[float] | None = None
    record: Mapping[str, float] | None = None
    trips: bool | None = None
    losses: Mapping[str, Sequence[float]] | None = None


class Rule(Options):
    """One rule: which tensors, at which moment, and (in the subclass) what to do with them."""

    # The kind of the action in one word, for files and for people; code asks for the kind itself.
    role: ClassVar[Role]
    # What the action can act on; the table of section 4 of the rule language.
    targets: ClassVar[tuple[TargetKind, ...]] = TARGETS
    # The points at which the action may stand; the first is the default unless `at` must be given.
    points: ClassVar[tuple[Point, ...]] = ("backward", "step")
    needs_at: ClassVar[bool] = False
    takes_at: ClassVar[bool] = True
    no_at_reason: ClassVar[str] = ""
    # Whether editing the parts of a sum is editing the sum.
    linear: ClassVar[bool] = True
    # Whether the rule needs a number that is taken over a whole gradient.
    measures: ClassVar[bool] = False
    # Whether what it does is decided by the gradient as the script hands it over, before any edit at `step`.
    judges_first: ClassVar[bool] = False
    # Options that a target needs.
    needs: ClassVar[Mapping[TargetKind, str]] = {}
    # Options of which at least one must be given.
    either: ClassVar[tuple[str, ...]] = ()
    EXAMPLES: ClassVar[tuple[Example, ...]] = ()

    id: Annotated[RuleId, Field(description="Unique name of the rule, kebab-case.")]
    action: Annotated[str, Field(description="What the rule does.")]
    params: Annotated[
        Patterns | None,
        Field(description="Patterns of parameter names; `*` crosses dots. Always quoted."),
    ] = None
    modules: Annotated[
        Patterns | None, Field(description='Patterns of module names; "." is the root.')
    ] = None
    tensors: Annotated[
        Patterns | None, Field(description="Patterns of names given by `gradsurgeon.tag`.")
    ] = None
    tensor: Annotated[
        str | None,
        Field(
            description="Which tensor: of a parameter `grad`; of a module `output`, `input`, "
            "`output.grad`, `input.grad`, or one by path as `output[0].grad`; of a tag `grad` or "
            "`value`."
        ),
    ] = None
    exclude: Annotated[Patterns, Field(description="Patterns of names that are left out.")] = ()
    where: Annotated[Where, Field(description="Conditions beside the name.")] = Where()
    at: Annotated[Point | None, Field(description="The moment at which the rule acts.")] = None
    steps: Annotated[Steps, Field(description="The steps in which the rule acts.")] = Steps()
    expect: Annotated[Expect | None, Field(description="Assertion on what is bound.")] = None
    optional: Annotated[
        bool,
        Field(description="Matching nothing is no error."),
        Stricter(
            operator.not_,
            "matching nothing is an error now",
            "matching nothing is no error now",
        ),
    ] = False
    model: Annotated[
        Glob | None, Field(description="Glob over the class name of the root of the model.")
    ] = None
    when: Annotated[
        Literal["train"] | None,
        Field(description="Edit outputs and inputs in training mode only, not in every forward."),
    ] = None

    @property
    def target(self) -> TargetKind:
        """The kind of thing whose names the patterns match."""
        return next(kind for kind in TARGETS if getattr(self, kind) is not None)

    @property
    def ref(self) -> TensorRef:
        """The tensor that the rule means."""
        tensor = parse_tensor(self.target, self.tensor)
        if isinstance(tensor, str):  # validation has refused it
            raise TypeError(tensor)
        return tensor

    @property
    def point(self) -> Moment:
        """The moment at which the rule acts, the default of its action filled in."""
        if self.target == "params":
            return self.at or self.points[0]
        return "backward" if self.ref.grad else "forward"

    @property
    def order(self) -> int:
        """Where the rule stands among those on the same tensor; of equal ones the file order decides."""
        return 2 * MOMENTS.index(self.point)

    @property
    def edits(self) -> bool:
        """Whether the rule changes what it matches."""
        return self.role == "edit"

    @property
    def keeps_zero(self) -> bool:
        """Whether a zero stays a zero.

        Then acting on the stored values of a sparse gradient is acting on the gradient.
        """
        return True

    @property
    def hides_overflow(self) -> bool:
        """Whether the rule is there to replace non-finite elements, which a scaler must see."""
        return False

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
        return tuple(compile_pattern(text) for text in getattr(self, self.target))

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        """Yield the flaws of target and `at`; actions add those of their options."""
        if cls is Rule:  # the action is unknown, and with it what goes together
            return
        target = yield from target_flaws(cls.name(), cls.targets, given)
        if target in ("modules", "tensors") and cls.takes_at:
            if given.get("at") is not None:
                message = f"`at` is for `params`: {target} act at the moment the tensor is there"
                yield Flaw("at", message, "remove it", key=True)
            return
        yield from cls._at_flaws(given.get("at"))

    @classmethod
    def _at_flaws(cls, at: object) -> Iterator[Flaw]:
        if not cls.takes_at:
            if at is not None:
                message = f"{cls.name()} takes no `at`: {cls.no_at_reason}"
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

    def complex_problem(self) -> str:
        """Return why the rule cannot act on complex gradients; empty where it can."""
        return ""

    def compile(self) -> Effect:
        """Return what the rule does. May need torch; called once per session."""
        # Not abstract: the options that all rules share are checked on a plain rule as well.
        raise NotImplementedError

    @classmethod
    def __pydantic_init_subclass__(cls, **_options: Any) -> None:
        """Make an action known by its name as soon as its class is defined."""
        if "action" not in inspect.get_annotations(cls):  # a kind of actions, or a variant of one
            return
        name, problem = cls.name(), ""
        if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) is None:
            problem = 'give it a name: `action: Literal["my-action"] = "my-action"`'
        elif not hasattr(cls, "role"):
            problem = "derive it from EditRule, ObserverRule, TrapRule, CaptureRule or FreezeRule"
        elif inspect.isabstract(cls):
            problem = "define `compile`"
        elif cls.role == "edit" and "accumulated" in cls.points:
            problem = "an edit cannot act at `accumulated`: take it out of `points`"
        other = known_actions.get(name, cls)
        # A cell of a notebook defines its classes anew each time it is run.
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            problem = f"{other.__module__}.{other.__qualname__} is the action `{name}` already"
        if problem:
            raise TypeError(f"{cls.__module__}.{cls.__qualname__} is no action: {problem}")
        known_actions[name] = cls


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules that stand in file order in the order in which they act on one tensor."""
    # The sort is stable: within one moment the file order stands.
    return sorted(rules, key=lambda rule: rule.order)
