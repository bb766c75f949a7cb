"""The kinds of actions. Each action is a class derived from one of them.

The kind of a rule and the result of its `compile` decide its effect on training.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from gradsurgeon.actions._base import GRADIENTS_ONLY, Point, Role, Rule
from gradsurgeon.actions._effects import (
    Combination,
    Comparison,
    Copies,
    Decision,
    Edit,
    Examination,
    Hidden,
    Observer,
    Spikes,
    Then,
)
from gradsurgeon.actions._fields import (
    FROM_LIST,
    Flaw,
    Limit,
    TargetKind,
    TensorRef,
    each_once,
    parse_tensor,
)
from gradsurgeon.errors import printable

_READING: tuple[Point, ...] = ("accumulated", "backward", "step")


class EditRule(Rule):
    """A rule that changes its matches."""

    role: ClassVar[Role] = "edit"

    @abstractmethod
    def compile(self) -> Edit:
        """Return the arithmetic. Needs torch; called once per session."""


class ObserverRule(Rule):
    """A rule that records the statistics in its attribute ``stats`` and changes nothing."""

    role: ClassVar[Role] = "observe"
    points: ClassVar[tuple[Point, ...]] = _READING
    reads_weights: ClassVar[bool] = True

    if TYPE_CHECKING:  # an option of some actions, a constant of others

        @property
        def stats(self) -> tuple[str, ...]: ...

    def compile(self) -> Observer:
        """Return the statistics to record."""
        return Observer(tuple(self.stats))


class TrapRule(Rule):
    """A rule that decides right before an update whether it takes place."""

    role: ClassVar[Role] = "trap"
    points: ClassVar[tuple[Point, ...]] = ("accumulated",)
    takes_at: ClassVar[bool] = False
    no_at_reason: ClassVar[str] = (
        "it looks after each backward pass and decides right before the update"
    )

    then: Annotated[
        Then,
        Field(description="The consequence for the step."),
    ] = "raise"
    give_up_after: Annotated[
        Limit,
        Field(
            description="Raise after this many trips in a row, whatever `then` says; `never` for no limit."
        ),
    ] = 10

    @abstractmethod
    def compile(self) -> Decision | Spikes:
        """Return the condition on the gradients, and its consequence."""


class CheckRule(Rule):
    """A rule that looks for faults of a training, changes nothing and needs no number."""

    role: ClassVar[Role] = "check"
    targets: ClassVar[tuple[TargetKind, ...]] = ("params",)
    points: ClassVar[tuple[Point, ...]] = ("step",)
    takes_at: ClassVar[bool] = False
    no_at_reason: ClassVar[str] = "it looks before and after passes and updates"

    @property
    def tells_owners(self) -> bool:
        """Whether the check tells parameters that no optimizer owns, so that no other rule has to."""
        return False

    then: Annotated[
        Literal["warn", "raise"],
        Field(description="Whether a finding is only told, or also stops the training."),
    ] = "warn"

    @abstractmethod
    def compile(self) -> Examination:
        """Return the check, a `gradsurgeon.checks.base.Check`. Needs torch; called once per session."""


class CaptureRule(Rule):
    """A rule that keeps copies of tensors."""

    role: ClassVar[Role] = "capture"
    points: ClassVar[tuple[Point, ...]] = _READING

    max_bytes: Annotated[
        int, Field(ge=1, description="Bytes of all copies; new copies replace the oldest.")
    ] = 256 * 2**20

    def compile(self) -> Copies:
        """Return the limit of the copies."""
        return Copies(self.max_bytes)


class FreezeRule(Rule):
    """A rule that hides gradients from the optimizer."""

    role: ClassVar[Role] = "freeze"
    targets: ClassVar[tuple[TargetKind, ...]] = ("params",)
    points: ClassVar[tuple[Point, ...]] = ("step",)

    def compile(self) -> Hidden:
        """Return that the gradient is hidden."""
        return Hidden()


LossNames = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    FROM_LIST,
    AfterValidator(each_once),
    Field(min_length=1),
    WithJsonSchema(
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True}
    ),
]


# Numbers by names of losses.
LossNumbers = Annotated[dict[str, float], Field(min_length=1)]

_ON_INPUTS = "write `tensor: input.grad`"


class LossRule(Rule):
    """A rule on the gradients of several losses, or of several modules with the same input tensor."""

    targets: ClassVar[tuple[TargetKind, ...]] = ("params", "modules")
    points: ClassVar[tuple[Point, ...]] = ("backward",)
    takes_at: ClassVar[bool] = False
    no_at_reason: ClassVar[str] = (
        "it acts while `gradsurgeon.backward` runs, or as modules send their gradients back"
    )
    linear: ClassVar[bool] = False
    needs: ClassVar[Mapping[TargetKind, str]] = {"params": "losses"}
    tensor_hints: ClassVar[Mapping[TargetKind, str]] = {**Rule.tensor_hints, "modules": _ON_INPUTS}
    # The numbers that are recorded in each call.
    stats: ClassVar[tuple[str, ...]]

    losses: Annotated[
        LossNames | None,
        Field(
            description="Names of losses, as passed to `gradsurgeon.backward`; with `params`.",
            examples=[["seg", "depth"]],
        ),
    ] = None

    @abstractmethod
    def compile(self) -> Combination | Comparison:
        """Return how the gradients are combined or compared. Needs torch; called once per session."""

    @property
    def order(self) -> int:
        # The gradients of single losses exist before their sum does. Rules on single modules act before
        # the gradients of the modules meet.
        return super().order + (1 if self.target == "modules" else -1)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.target == "modules":
            return ("each rank uses its own gradients",)
        losses = ", ".join(f'"{printable(name)}": ...' for name in self.losses or ())
        return (f"sees losses in gradsurgeon.backward({{{losses}}}) only, not in `.backward()`",)

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        yield from super().flaws(given)
        if given.get("params") is not None:
            yield from cls._flaws_of_losses(given.get("losses"))
        elif given.get("modules") is not None:
            if given.get("losses") is not None:
                message = "`losses` is for `params`: on modules each module counts by itself"
                yield Flaw("losses", message, "remove it, or name `params`", key=True)
            if given.get("when") is not None:
                yield Flaw("when", GRADIENTS_ONLY, "remove it", key=True)
            tensor = given.get("tensor")
            ref = parse_tensor("modules", tensor) if isinstance(tensor, str) else ""
            if isinstance(ref, TensorRef) and not (ref.grad and ref.side == "input"):
                message = f"{cls.name()} acts on inputs that modules share, not on `{tensor}`"
                yield Flaw("tensor", message, _ON_INPUTS)

    @classmethod
    def _flaws_of_losses(cls, losses: object) -> Iterator[Flaw]:
        if losses is None:
            message = "missing key `losses`: on parameters the rule needs the losses whose gradients meet there"
            hint = 'such as `losses: ["seg", "depth"]`, the names in gradsurgeon.backward({"seg": ..., "depth": ...})'
            yield Flaw("losses", message, hint, missing=True, check="missing-key")
        elif isinstance(losses, list | tuple) and len(losses) == 1:
            message = "expected two losses or more, found one: nothing can conflict with it"
            yield Flaw("losses", message, "name the others")
