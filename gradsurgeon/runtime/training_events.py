"""What happens to a model in training: the facts, and the protocol by which detectors tell of them.

Detectors know torch and no rule. Each of them tells one receiver, the controller of a session, which
knows the order in which rules act.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from gradsurgeon.runtime.step_counter import StepCounter

if TYPE_CHECKING:
    from gradsurgeon.runtime.step_decision import StepDecision


@dataclass(slots=True)
class BackwardPass:
    """One backward pass: the tensors in the order in which they received their gradients."""

    order: list[int] = field(default_factory=list)
    # Where in ``order`` it went on after another pass had got something, and when. By this, passes
    # inside one another are put into one order.
    runs: list[tuple[int, int]] = field(default_factory=list)
    # By rule at `backward` and by tensor, the statistics of what this pass contributed.
    logged: dict[str, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    # Norms of what this rank alone has contributed, where an average over ranks is about to follow.
    own: dict[int, Tensor] = field(default_factory=dict)
    # What a `GradScaler` has multiplied its gradients by.
    scale: Tensor | None = None
    # It began on gradients that were there before: one more micro-batch of the same step.
    continued: bool = False
    # Gradients that were there before it, where that matters: the tensor, whether it was edited as a final
    # one, and whether it held anything but zeros.
    onto: list[tuple[int, bool, Tensor]] = field(default_factory=list)
    # Whether gradients held something before it, of tensors with a bound on what one pass contributes.
    added_to: dict[int, Tensor] = field(default_factory=dict)
    # What it has yet to reach; known only where the engine does not tell when it is through.
    awaited: set[int] | None = None

    def followed_by(self, other: BackwardPass) -> BackwardPass:
        """Return both as one pass."""
        for rule, rows in other.logged.items():
            self.logged.setdefault(rule, {}).update(rows)
        scale = self.scale if other.scale is None else other.scale
        both = BackwardPass(logged=self.logged, own={**self.own, **other.own}, scale=scale)
        for time, tensors in sorted([*self._pieces(), *other._pieces()]):
            both.runs.append((time, len(both.order)))
            both.order += tensors
        both.continued = self.continued or other.continued
        both.onto = [*self.onto, *other.onto]
        both.added_to = {**self.added_to, **other.added_to}
        return both

    def _pieces(self) -> Iterator[tuple[int, list[int]]]:
        # Where no parameter got anything there are none: a hook on a module may have opened the pass.
        starts = [*(start for _, start in self.runs), len(self.order)]
        for (time, _), (start, stop) in zip(self.runs, pairwise(starts), strict=True):
            yield time, self.order[start:stop]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An update that is about to take place.

    Attributes:
        counter: of the optimizer, or the common one where weights are updated by hand.
        scale: that a fused optimizer gets its gradients with.
        inside: it takes place inside a backward pass, on what that pass has finished so far.
    """

    counter: StepCounter
    scale: Tensor | None = None
    inside: bool = False


class TrainingEvents(Protocol):
    """What a controller is told, in the order in which it happens."""

    def backward_started(self) -> None:
        """Take notice of a backward pass, before its first gradient is acted on."""

    def backward_finished(self, done: BackwardPass) -> None:
        """Act on the gradients of a backward pass, what follows its last gradient (DDP) included."""

    def expects_update(self) -> bool:
        """Tell whether an optimizer is going to step: what waits may be handed over then."""

    def optimizer_found(self) -> None:
        """Take notice of the first optimizer that owns parameters, before it is one."""

    def step_starting(self, step: Step) -> StepDecision:
        """Act right before an update; return what is to become of it."""

    def step_finished(self, step: Step, *, took_place: bool) -> None:
        """Count an attempted update; one that raised has not taken place."""

    def step_skipped_by_scaler(self, counter: StepCounter, scale: Tensor) -> None:
        """Count an update that a scaler has skipped for overflow."""
