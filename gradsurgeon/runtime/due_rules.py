"""Step counters, one per optimizer, and the rules that are due for one counter in one step, sorted once and cached."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gradsurgeon.actions import (
    CaptureRule,
    Decision,
    FreezeRule,
    ObserverRule,
    Rule,
    Spikes,
    TrapRule,
)
from gradsurgeon.language.compiler import Program, Stage
from gradsurgeon.records.store import Key
from gradsurgeon.tensors.statistics import columns_of


class Schedule:
    """Tells which rules are due at a step. A rule that rests is never due."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = [rule.id for rule in rules]
        self.resting: set[str] = set()

    def rests(self, rule: Rule) -> bool:
        return rule.id in self.resting

    def rest(self, rules: Collection[str]) -> list[str]:
        """Let rules rest for good; return those that did not rest before."""
        news = [rule for rule in rules if rule not in self.resting]
        self.resting.update(news)
        return news

    def due(self, rule: Rule, step: int) -> bool:
        return not self.rests(rule) and rule.steps.includes(step)


@dataclass(slots=True, eq=False)
class StepCounter:
    """Counts the updates of one optimizer; ``step`` is the number of the next one, from 0."""

    step: int
    indices: tuple[int, ...] = field(default=())
    # Backward passes that feed the next update.
    passes: int = 0
    # Whether it has counted an update.
    begun: bool = False
    # The trips in a row of each trap, without the current update; and with it, as far as it was judged.
    trips: dict[str, int] = field(default_factory=dict)
    trips_now: dict[str, int] = field(default_factory=dict)
    # The number of updates in a row that a `GradScaler` has left out.
    scaler_skips: int = 0

    def tick(self) -> None:
        self.begun = True
        self.step += 1
        self.passes = 0
        if self.trips_now:
            self.trips = {rule: n for rule, n in (self.trips | self.trips_now).items() if n}
            self.trips_now.clear()


class StepCounters:
    """The counter of every tensor. Tensors share a common counter until an optimizer claims them."""

    def __init__(self, count: int, start: int) -> None:
        self.common = StepCounter(start, tuple(range(count)))
        # The start of an optimizer's counter that takes over from no other.
        self.start = start
        self._of = [self.common] * count
        # Callers that cache a grouping by counter compare this number.
        self.version = 0
        # Restored step per tensor.
        self._resumed: dict[int, int] = {}

    def __getitem__(self, index: int) -> StepCounter:
        return self._of[index]

    def among(self, indices: Sequence[int]) -> list[StepCounter]:
        if not indices:
            return []
        first = self._of[indices[0]]
        if len(first.indices) == len(self._of):  # nearly always one optimizer owns all tensors
            return [first]
        return list(dict.fromkeys(map(self._of.__getitem__, indices)))

    @property
    def latest(self) -> int:
        return max((counter.step for counter in self._of), default=self.common.step)

    def begin(self, indices: Iterable[int]) -> int:
        """Return the first number of a counter for tensors that no optimizer has owned yet."""
        return max((self._resumed.get(t, self.start) for t in indices), default=self.start)

    def resume(self, steps: Mapping[int, int], *, common: int, latest: int) -> None:
        """Resume from the numbers of tensors; tensors without a number begin with the latest."""
        self._resumed = dict(steps)
        self.common.step, self.start = common, latest
        for counter in set(self._of):
            if counter is not self.common:
                counter.step = self.begin(counter.indices)

    def claim(self, indices: Iterable[int], counter: StepCounter) -> None:
        """Give tensors to a counter, which goes on from their latest one: a script may rebuild its optimizer."""
        wanted = tuple(sorted(indices))
        held = [index for index, holder in enumerate(self._of) if holder is counter]
        if held == list(wanted):
            return
        for index in held:
            self._of[index] = self.common
        earlier = [self._of[index] for index in wanted]
        for holder in earlier:
            if holder is not self.common:
                counter.step = max(counter.step, holder.step)
            counter.trips |= holder.trips
            counter.scaler_skips = max(counter.scaler_skips, holder.scaler_skips)
            # Passes that came before their optimizer was known still feed its next update.
            counter.passes = max(counter.passes, holder.passes)
        for index in wanted:
            self._of[index] = counter
        counter.indices = wanted
        for other in {*self._of, *earlier, self.common}:
            other.indices = tuple(i for i, holder in enumerate(self._of) if holder is other)
        self.version += 1


# The statistic of `nan-trap`. It costs nothing extra: norms that are measured anyway show NaN and Inf.
NONFINITE = "nonfinite"


@dataclass(frozen=True, slots=True, eq=False)
class BoundRule:
    """The tensors of one rule that share one counter, its record keys by statistic, and the statistic that it decides by."""

    rule: Rule
    counter: StepCounter
    indices: tuple[int, ...]
    keys: dict[str, tuple[Key, ...]]
    decides_by: str

    def columns(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the columns of some of the tensors in a record; ``indices`` are in the order of the record."""
        if len(indices) == len(self.indices):
            return range(len(indices))
        column = {index: number for number, index in enumerate(self.indices)}
        return [column[index] for index in indices]


class DueRules:
    """The rules of one step counter that are due, in file order, and their tensors, ascending."""

    def __init__(self, moments: Iterable[Sequence[BoundRule]]) -> None:
        in_backward, after, at_step, of_weights = moments
        self.after, self.at_step, self.of_weights = after, at_step, of_weights
        deciding = [bound for bound in after if bound.decides_by]
        self.traps = [bound for bound in deciding if bound.decides_by == NONFINITE]
        self.thresholds = [bound for bound in deciding if bound.decides_by != NONFINITE]
        self.spike_traps = [bound for bound in at_step if isinstance(bound.rule, TrapRule)]
        # Spike traps that report spikes instead of cutting them.
        self.reported = [bound for bound in self.spike_traps if not bound.rule.edits]
        self.watched = _indices_of(after)
        self.trapped = _indices_of(self.traps)
        # Tensors whose norm after backward a trap or a record reads.
        self.normed = _indices_of([*self.traps, *(bound for bound in after if "l2" in bound.keys)])
        # Tensors that rules judge or edit at the update.
        self.final = _indices_of([*deciding, *at_step])
        self.edited = frozenset(_indices_of(b for b in at_step if b.rule.edits))
        self.frozen = frozenset(_indices_of(b for b in at_step if isinstance(b.rule, FreezeRule)))
        self.bound_rules = (*in_backward, *after, *at_step, *of_weights)
        # A trap judges the gradients again after rules that can make finite gradients non-finite.
        self.judged_again = bool(self.traps) and any(b.rule.may_overflow for b in at_step)
        # Whether a rule needs the host to know if the update takes place.
        self.ask_host = any(
            isinstance(b.rule, ObserverRule | CaptureRule | TrapRule) and not b.rule.edits
            for b in at_step
        )


def _indices_of(bound_rules: Iterable[BoundRule]) -> tuple[int, ...]:
    return tuple(sorted({index for bound_rule in bound_rules for index in bound_rule.indices}))


NOTHING_DUE = DueRules(((), (), (), ()))


class RulesByCounter:
    """The rules on parameters, grouped by the step counter of each parameter."""

    def __init__(
        self,
        program: Program,
        counters: StepCounters,
        decisions: Mapping[str, Decision | Spikes],
        schedule: Schedule,
    ) -> None:
        self._program = program
        self._schedule = schedule
        self._decides_by = {
            rule: decision.statistic
            for rule, decision in decisions.items()
            if isinstance(decision, Decision)
        }
        self._counters = counters
        self._moments: tuple[tuple[Stage, ...], ...] = (
            (*program.of_losses, *program.in_backward),
            program.after_backward,
            program.at_step,
            program.of_weights,
        )
        stages = [stage for stages in (*self._moments, program.checks) for stage in stages]
        # Only the other schedules are evaluated: most rules act in every step.
        self._schedules = [s.rule.steps for s in stages if not s.rule.steps.always]
        self.any_always = len(self._schedules) < len(stages)
        self._bound: dict[StepCounter, list[list[BoundRule]]] = {}
        self._due: dict[tuple[StepCounter, int, tuple[bool, ...]], DueRules] = {}
        self._division = -1  # the version of the counters that the caches are valid for

    def due(self, counter: StepCounter) -> DueRules:
        moments, step = self._of(counter), counter.step
        in_steps = tuple([steps.includes(step) for steps in self._schedules])
        key = counter, len(self._schedule.resting), in_steps
        if key not in self._due:
            is_due = self._schedule.due
            due = ([bound for bound in rules if is_due(bound.rule, step)] for rules in moments)
            self._due[key] = DueRules(due)
        return self._due[key]

    def any_due(self, step: int) -> bool:
        """Return whether any rule is due at a step, on any tensor."""
        return self.any_always or any(steps.includes(step) for steps in self._schedules)

    def bound_rule(self, rule: str, counter: StepCounter) -> BoundRule:
        bound_rules = [bound for rules in self._of(counter) for bound in rules]
        return next(bound for bound in bound_rules if bound.rule.id == rule)

    def _of(self, counter: StepCounter) -> list[list[BoundRule]]:
        if self._division != self._counters.version:
            self._division = self._counters.version
            self._bound.clear()
            self._due.clear()
        if counter not in self._bound:
            self._bound[counter] = [[*self._parts(stages, counter)] for stages in self._moments]
        return self._bound[counter]

    def _parts(self, stages: Iterable[Stage], counter: StepCounter) -> Iterator[BoundRule]:
        for stage in stages:
            indices = tuple(index for index in stage.indices if self._counters[index] is counter)
            if indices:
                rule = stage.rule
                names = tuple(self._program.names[index] for index in indices)
                stats: tuple[str, ...] = getattr(rule, "stats", ())
                keys = {
                    stat: tuple(Key(rule.id, one, rule.point, names) for one in columns_of(stat))
                    for stat in stats
                }
                decides_by = self._decides_by.get(rule.id, "")
                yield BoundRule(rule, counter, indices, keys, decides_by)
