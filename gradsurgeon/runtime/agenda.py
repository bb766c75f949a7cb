"""What is due for one clock in one step, sorted once and kept until something else is due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradsurgeon.actions import Decision, EditRule, FreezeRule, Rule
from gradsurgeon.compiler import Program, Stage
from gradsurgeon.runtime.clock import Clock, Clocks
from gradsurgeon.store import Key

# The statistic of `nan-trap`, which norms that are taken anyway tell of.
NONFINITE = "nonfinite"


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The tensors of one rule that go by one clock, the series that it fills, and what it decides by."""

    rule: Rule
    clock: Clock
    tensors: tuple[int, ...]
    keys: dict[str, Key]
    decision: Decision | None = None

    def columns(self, tensors: Sequence[int]) -> Sequence[int]:
        """Return the columns of a record that some of the tensors have, which come in its order."""
        if len(tensors) == len(self.tensors):
            return range(len(tensors))
        column = {tensor: number for number, tensor in enumerate(self.tensors)}
        return [column[tensor] for tensor in tensors]


class Agenda:
    """The rules of one clock that are due.

    Attributes:
        in_backward: those that act while a backward pass runs.
        after: those that look once it is over.
        at_step: those that act right before the update, in file order.
        watched: the tensors of ``after``, ascending.
        trapped: those of them that a trap watches, ascending.
        normed: those of them whose norm after backward somebody reads, ascending.
        traps: those of ``after`` that decide by what is not finite.
        thresholds: those that decide by another statistic.
        judged: the tensors of both, ascending.
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
        "judged",
        "normed",
        "stepped",
        "thresholds",
        "trapped",
        "traps",
        "watched",
    )

    def __init__(
        self, in_backward: Iterable[Lane], after: Iterable[Lane], at_step: Iterable[Lane]
    ) -> None:
        self.in_backward = tuple(in_backward)
        self.after = tuple(after)
        self.at_step = tuple(at_step)
        deciding = [(lane, lane.decision) for lane in self.after if lane.decision is not None]
        self.traps = tuple(lane for lane, decision in deciding if decision.statistic == NONFINITE)
        self.thresholds = tuple(lane for lane, _ in deciding if lane not in self.traps)
        self.watched = _tensors(self.after)
        self.trapped = _tensors(self.traps)
        self.judged = _tensors((*self.traps, *self.thresholds))
        self.normed = _tensors(
            lane for lane in self.after if lane in self.traps or "l2" in lane.keys
        )
        self.stepped = _tensors(self.at_step)
        self.frozen = frozenset(
            _tensors(ln for ln in self.at_step if isinstance(ln.rule, FreezeRule))
        )
        self.edited = frozenset(
            _tensors(ln for ln in self.at_step if isinstance(ln.rule, EditRule))
        )

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (*self.in_backward, *self.after, *self.at_step)


def _tensors(lanes: Iterable[Lane]) -> tuple[int, ...]:
    return tuple(sorted({tensor for lane in lanes for tensor in lane.tensors}))


class _OfClock:
    """The rules of one clock, whether due or not."""

    def __init__(self, *moments: list[Lane]) -> None:
        self.moments = moments
        # Most rules act in every step, and need not be asked.
        self._schedules = [
            lane.rule.steps for lanes in moments for lane in lanes if not lane.rule.steps.always
        ]
        self._known: dict[tuple[bool, ...], Agenda] = {}

    def due(self, step: int) -> Agenda:
        key = tuple([schedule.due(step) for schedule in self._schedules])
        agenda = self._known.get(key)
        if agenda is None:
            agenda = self._known[key] = Agenda(
                *([lane for lane in lanes if lane.rule.steps.due(step)] for lanes in self.moments)
            )
        return agenda


class Agendas:
    """The rules on parameters, divided by the clock that each parameter goes by."""

    def __init__(self, program: Program, clocks: Clocks, decisions: Mapping[str, Decision]) -> None:
        self._program = program
        self._decisions = decisions
        self._clocks = clocks
        in_backward: dict[str, tuple[Rule, list[int]]] = {}
        for tensor, rules in program.per_tensor.items():
            for rule in rules:
                in_backward.setdefault(rule.id, (rule, []))[1].append(tensor)
        self._moments: tuple[tuple[Stage, ...], ...] = (
            tuple(Stage(rule, tuple(tensors)) for rule, tensors in in_backward.values()),
            program.after_backward,
            program.at_step,
        )
        self._of: dict[Clock, _OfClock] = {}
        self._division = -1  # as of which division into clocks

    def due(self, clock: Clock) -> Agenda:
        """Return what is due in the step that a clock is in."""
        return self._of_clock(clock).due(clock.step)

    def lane(self, rule: str, clock: Clock) -> Lane:
        """Return the part of a rule that goes by a clock, due or not."""
        lanes = (lane for lanes in self._of_clock(clock).moments for lane in lanes)
        return next(lane for lane in lanes if lane.rule.id == rule)

    def _of_clock(self, clock: Clock) -> _OfClock:
        if self._division != self._clocks.version:
            self._division = self._clocks.version
            self._of.clear()
        if clock not in self._of:
            self._of[clock] = _OfClock(*([*self._parts(stages, clock)] for stages in self._moments))
        return self._of[clock]

    def _parts(self, stages: Iterable[Stage], clock: Clock) -> Iterator[Lane]:
        for stage in stages:
            tensors = tuple(tensor for tensor in stage.tensors if self._clocks[tensor] is clock)
            if tensors:
                rule = stage.rule
                names = tuple(self._program.names[tensor] for tensor in tensors)
                stats: tuple[str, ...] = getattr(rule, "stats", ())
                keys = {stat: Key(rule.id, stat, rule.point, names) for stat in stats}
                yield Lane(rule, clock, tensors, keys, self._decisions.get(rule.id))
