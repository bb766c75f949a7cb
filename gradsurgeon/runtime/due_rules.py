"""What is due for one clock in one step, sorted once and kept until something else is due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradsurgeon.actions import Decision, EditRule, FreezeRule, Rule
from gradsurgeon.compiler import Program, Stage
from gradsurgeon.runtime.step_counter import StepCounter, StepCounters
from gradsurgeon.store import Key

# The statistic of `nan-trap`, which norms that are taken anyway tell of.
NONFINITE = "nonfinite"


@dataclass(frozen=True, slots=True, eq=False)
class BoundRule:
    """The tensors of one rule that go by one clock, the series that it fills, and what it decides by."""

    rule: Rule
    counter: StepCounter
    tensors: tuple[int, ...]
    keys: dict[str, Key]
    decision: Decision | None = None

    @property
    def decides_by_nonfinite(self) -> bool:
        return self.decision is not None and self.decision.statistic == NONFINITE

    def columns(self, tensors: Sequence[int]) -> Sequence[int]:
        """Return the columns of a record that some of the tensors have, which come in its order."""
        if len(tensors) == len(self.tensors):
            return range(len(tensors))
        column = {tensor: number for number, tensor in enumerate(self.tensors)}
        return [column[tensor] for tensor in tensors]


class DueRules:
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
        self,
        in_backward: Iterable[BoundRule],
        after: Iterable[BoundRule],
        at_step: Iterable[BoundRule],
    ) -> None:
        self.in_backward = tuple(in_backward)
        self.after = tuple(after)
        self.at_step = tuple(at_step)
        deciding = [bound_rule for bound_rule in self.after if bound_rule.decision is not None]
        self.traps = tuple(rule for rule in deciding if rule.decides_by_nonfinite)
        self.thresholds = tuple(rule for rule in deciding if not rule.decides_by_nonfinite)
        self.watched = _tensors(self.after)
        self.trapped = _tensors(self.traps)
        self.judged = _tensors(deciding)
        self.normed = _tensors(
            bound_rule
            for bound_rule in self.after
            if bound_rule.decides_by_nonfinite or "l2" in bound_rule.keys
        )
        self.stepped = _tensors(self.at_step)
        self.frozen = frozenset(
            _tensors(bound for bound in self.at_step if isinstance(bound.rule, FreezeRule))
        )
        self.edited = frozenset(
            _tensors(bound for bound in self.at_step if isinstance(bound.rule, EditRule))
        )

    @property
    def bound_rules(self) -> tuple[BoundRule, ...]:
        return (*self.in_backward, *self.after, *self.at_step)


def _tensors(bound_rules: Iterable[BoundRule]) -> tuple[int, ...]:
    return tuple(sorted({tensor for bound_rule in bound_rules for tensor in bound_rule.tensors}))


class _RulesOfCounter:
    """The rules of one clock, whether due or not."""

    def __init__(self, *moments: list[BoundRule]) -> None:
        self.moments = moments
        # Most rules act in every step, and need not be asked.
        self._schedules = [
            bound_rule.rule.steps
            for bound_rules in moments
            for bound_rule in bound_rules
            if not bound_rule.rule.steps.always
        ]
        self._known: dict[tuple[bool, ...], DueRules] = {}

    def due(self, step: int) -> DueRules:
        key = tuple([schedule.due(step) for schedule in self._schedules])
        due_rules = self._known.get(key)
        if due_rules is None:
            due_rules = self._known[key] = DueRules(
                *(
                    [bound_rule for bound_rule in bound_rules if bound_rule.rule.steps.due(step)]
                    for bound_rules in self.moments
                )
            )
        return due_rules


class RulesByCounter:
    """The rules on parameters, divided by the clock that each parameter goes by."""

    def __init__(
        self, program: Program, counters: StepCounters, decisions: Mapping[str, Decision]
    ) -> None:
        self._program = program
        self._decisions = decisions
        self._counters = counters
        in_backward: dict[str, tuple[Rule, list[int]]] = {}
        for tensor, rules in program.per_tensor.items():
            for rule in rules:
                in_backward.setdefault(rule.id, (rule, []))[1].append(tensor)
        self._moments: tuple[tuple[Stage, ...], ...] = (
            tuple(Stage(rule, tuple(tensors)) for rule, tensors in in_backward.values()),
            program.after_backward,
            program.at_step,
        )
        self._of: dict[StepCounter, _RulesOfCounter] = {}
        self._division = -1  # as of which division into clocks

    def due(self, counter: StepCounter) -> DueRules:
        """Return what is due in the step that a clock is in."""
        return self._of_counter(counter).due(counter.step)

    def bound_rule(self, rule: str, counter: StepCounter) -> BoundRule:
        """Return the part of a rule that goes by a clock, due or not."""
        bound_rules = (
            bound_rule
            for bound_rules in self._of_counter(counter).moments
            for bound_rule in bound_rules
        )
        return next(bound_rule for bound_rule in bound_rules if bound_rule.rule.id == rule)

    def _of_counter(self, counter: StepCounter) -> _RulesOfCounter:
        if self._division != self._counters.version:
            self._division = self._counters.version
            self._of.clear()
        if counter not in self._of:
            self._of[counter] = _RulesOfCounter(
                *([*self._parts(stages, counter)] for stages in self._moments)
            )
        return self._of[counter]

    def _parts(self, stages: Iterable[Stage], counter: StepCounter) -> Iterator[BoundRule]:
        for stage in stages:
            tensors = tuple(tensor for tensor in stage.tensors if self._counters[tensor] is counter)
            if tensors:
                rule = stage.rule
                names = tuple(self._program.names[tensor] for tensor in tensors)
                stats: tuple[str, ...] = getattr(rule, "stats", ())
                keys = {stat: Key(rule.id, stat, rule.point, names) for stat in stats}
                yield BoundRule(rule, counter, tensors, keys, self._decisions.get(rule.id))
