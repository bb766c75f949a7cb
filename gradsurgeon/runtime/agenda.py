"""What is due for one clock in one step, sorted once and kept until something else is due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradsurgeon.actions import Rule
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.store import Key


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The tensors of one rule that go by one clock."""

    rule: Rule
    clock: Clock
    tensors: tuple[int, ...]
    keys: dict[str, Key]

    def columns(self, tensors: Sequence[int]) -> Sequence[int]:
        """Return the columns of a record that some of the tensors have, which come in its order."""
        if len(tensors) == len(self.tensors):
            return range(len(tensors))
        column = {tensor: number for number, tensor in enumerate(self.tensors)}
        return [column[tensor] for tensor in tensors]


class Agenda:
    """The lanes of one clock that are due.

    Attributes:
        in_backward: those that act while a backward pass runs.
        after: those that look once it is over.
        at_step: those that act right before the update.
        watched: the tensors of ``after``, ascending.
        trapped: those of them that a trap watches, ascending.
        normed: those of them whose norm after backward somebody reads, ascending.
        stepped: the tensors of ``at_step``, ascending.
        edited: the tensors that an edit at the step may write.
        frozen: the tensors that are hidden from the optimizer.
    """

    __slots__ = (
        "after",
        "at_step",
        "edited",
        "frozen",
        "in_backward",
        "normed",
        "stepped",
        "trapped",
        "traps",
        "watched",
    )

    def __init__(
        self,
        in_backward: Iterable[Lane],
        after: Iterable[Lane],
        at_step: Iterable[Lane],
    ) -> None:
        self.in_backward = tuple(in_backward)
        self.after = tuple(after)
        self.at_step = tuple(at_step)
        self.traps = tuple(lane for lane in self.after if lane.rule.role == "trap")
        self.watched = _tensors(self.after)
        self.trapped = _tensors(self.traps)
        self.normed = _tensors(
            lane for lane in self.after if lane.rule.role == "trap" or "l2" in lane.keys
        )
        self.stepped = _tensors(self.at_step)
        self.frozen = frozenset(
            tensor for lane in self.at_step if lane.rule.role == "freeze" for tensor in lane.tensors
        )
        self.edited = frozenset(
            tensor for lane in self.at_step if lane.rule.role == "edit" for tensor in lane.tensors
        )

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All of them, one for each rule."""
        return (*self.in_backward, *self.after, *self.at_step)


def _tensors(lanes: Iterable[Lane]) -> tuple[int, ...]:
    return tuple(sorted({tensor for lane in lanes for tensor in lane.tensors}))


class Lanes:
    """The lanes of one clock, whether due or not."""

    def __init__(
        self,
        in_backward: list[Lane],
        after: list[Lane],
        at_step: list[Lane],
    ) -> None:
        self._moments = (in_backward, after, at_step)
        # Most rules act in every step, and need not be asked.
        self._scheduled = [
            lane.rule.steps for some in self._moments for lane in some if not lane.rule.steps.always
        ]
        self._known: dict[tuple[bool, ...], Agenda] = {}

    def lane(self, rule: str) -> Lane:
        """Return the lane of a rule."""
        return next(lane for some in self._moments for lane in some if lane.rule.id == rule)

    def due(self, step: int) -> Agenda:
        """Return what is due in a step."""
        key = tuple([schedule.due(step) for schedule in self._scheduled])
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Agenda(
                *([lane for lane in some if lane.rule.steps.due(step)] for some in self._moments)
            )
        return found
