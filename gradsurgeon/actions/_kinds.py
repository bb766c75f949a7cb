"""The kinds of actions. Each action is a class derived from one of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from gradsurgeon.actions._base import GRADIENTS_ONLY, Point, Role, Rule
from gradsurgeon.actions._effects import (
    ByNorm,
    Combination,
    Copies,
    Decision,
    Edit,
    Examination,
    Hidden,
    LossComparison,
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
from gradsurgeon.actions._ramps import Ramp
from gradsurgeon.errors import printable

_READING: tuple[Point, ...] = ("accumulated", "backward", "step")


class EditRule(Rule):
    """A rule that changes its matches.

    A class says what its edit never does. If the edit of a sum is the sum of the edits, ``linear`` is True: then `at: backward`
    warns of no accumulation. If the edit of a finite gradient is finite, `may_overflow` is False: then a trap does not
    judge the gradient again.
    """

    role: ClassVar[Role] = "edit"
    linear: ClassVar[bool] = False

    @property
    def ramps(self) -> dict[str, Ramp]:
        """The options whose numbers change with the update."""
        return {name: value for name, value in self if isinstance(value, Ramp)}

    @property
    def notes(self) -> tuple[str, ...]:
        start = self.steps.from_
        return tuple(f"`{name}` {ramp.described(start)}" for name, ramp in self.ramps.items())

    def in_step(self, step: int) -> Self:
        """Return the rule with the numbers that it has in one update."""
        start = self.steps.from_
        numbers = {name: ramp.value(step, start) for name, ramp in self.ramps.items()}
        return self.model_copy(update=numbers)

    @property
    def may_overflow(self) -> bool:
        """Whether the edit can make a finite gradient non-finite."""
        return True

    @abstractmethod
    def compile(self) -> Edit | ByNorm:
        """Return the arithmetic. Needs torch; called once per session, and for a ramp once per update."""


class ObserverRule(Rule):
    """A rule that records the statistics in its attribute ``stats`` and changes nothing."""

    role: ClassVar[Role] = "observe"
    points: ClassVar[tuple[Point, ...]] = _READING
    of_weights: ClassVar[tuple[str, ...]] = ("value", "update", "state.NAME")

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

    then: Annotated[Then, Field(description="The consequence for the step.")] = "raise"
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

    @property
    def tells_owners(self) -> bool:
        """Whether this check reports parameters without an optimizer. Other rules then skip that report."""
        return False

    then: Annotated[
        Literal["warn", "raise"],
        Field(description="Whether a finding is only reported, or also stops the training."),
    ] = "warn"

    @abstractmethod
    def compile(self) -> Examination:
        """Return the check, a `gradsurgeon.Check`. Needs torch; called once per session."""


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
]


_ON_INPUTS = "write `tensor: input.grad`"


class LossRule(Rule):
    """A rule on the gradients of several losses, or of several modules with the same input tensor."""

    targets: ClassVar[tuple[TargetKind, ...]] = ("params", "modules")
    points: ClassVar[tuple[Point, ...]] = ("backward",)
    takes_at: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    needs: ClassVar[Mapping[TargetKind, str]] = {"params": "losses"}
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
    def compile(self) -> Combination | LossComparison:
        """Return how the gradients are combined or compared. Needs torch; called once per session."""

    @property
    def order(self) -> int:
        # Rules on single modules act before the gradients of the modules meet.
        if self.target == "modules":
            return super().order + 1
        # The gradients of single losses exist before their sum does.
        return super().order - 1

    @property
    def notes(self) -> tuple[str, ...]:
        if self.target == "modules":
            return ("each rank uses its own gradients",)
        losses = ", ".join(f'"{printable(name)}": ...' for name in self.losses or ())
        return (f"sees losses in gradsurgeon.backward({{{losses}}}) only, not in `.backward()`",)

    def flaws(self) -> Iterator[Flaw]:
        """Yield the flaws of the target, its losses and its tensor."""
        yield from super().flaws()
        if self.params is not None and len(self.losses or ()) < 2:  # noqa: PLR2004 # a pair
            message = (
                "on parameters the rule needs `losses`, two or more, whose gradients meet there"
            )
            hint = 'such as `losses: ["seg", "depth"]`, the names in gradsurgeon.backward({"seg": ..., "depth": ...})'
            check = "bad-value"
            if self.losses is None:
                check = "missing-key"
            yield Flaw("losses", message, hint, check)
        elif self.params is None and self.modules is not None:
            if self.losses is not None:
                message = "`losses` is for `params`: on modules each module counts by itself"
                yield Flaw("losses", message, "remove it, or name `params`")
            if self.when is not None:
                yield Flaw("when", GRADIENTS_ONLY, "remove it")
            ref = parse_tensor("modules", self.tensor)
            if isinstance(ref, TensorRef) and (not ref.grad or ref.side != "input"):
                message = f"{self.name()} acts on inputs that modules share, not on `{self.tensor}`"
                yield Flaw("tensor", message, _ON_INPUTS)
