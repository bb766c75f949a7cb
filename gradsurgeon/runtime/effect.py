"""An effect: what one rule does, moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsurgeon.actions import Rule
from gradsurgeon.records.store import Key
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training_events import BackwardPass, Logged, WeightUpdate
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.runtime.update import DueUpdate
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.measure import Norms
from gradsurgeon.tensors.statistics import columns_of


@dataclass(slots=True)
class Origin:
    """Where a single tensor comes into being: the gradient of a parameter, or a tensor of a module or a tag.

    Attributes:
        name: its name in records and messages.
        step: the update that it feeds.
        counter: returns the counter of that update, whose optimizer may be met later.
        scale: the scale of a `GradScaler` on a gradient.
        is_gradient: whether it is a gradient, not a value.
        is_again: whether it came before, because a forward pass is run again, or a backward pass takes the gradient of one
            loss. Edits repeat then, and nothing is counted or recorded.
        index: the parameter, -1 for tensors of modules and tags.
        logged: where statistics of a parameter's gradient wait for the end of the pass.
    """

    name: str
    step: int
    counter: Callable[[], StepCounter]
    scale: Tensor | None = None
    is_gradient: bool = True
    is_again: bool = False
    index: int = -1
    logged: Logged | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """An effect on those of its parameters that share one counter, with the keys of their records by statistic."""

    effect: Effect
    counter: StepCounter
    indices: tuple[int, ...]
    keys: Mapping[str, tuple[Key, ...]]

    @property
    def rule(self) -> Rule:
        return self.effect.rule

    @property
    def step(self) -> int:
        return self.counter.step

    def columns(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the columns of some of the parameters in a record; ``indices`` are in the order of the record."""
        if len(indices) == len(self.indices):
            return range(len(indices))
        column = {index: number for number, index in enumerate(self.indices)}
        return [column[index] for index in indices]


class Effect:
    """What one rule does. Each method may be left out.

    A rule has one effect, for all optimizers. What an effect has seen it knows by parameter, so nothing has to move when
    an optimizer claims parameters.

    Attributes:
        indices: the parameters that the rule matches.
        compiled: what the rule compiles to.
        stats: the statistics that it records.
        moment: when it acts on all gradients of a moment: `accumulated` or `step`, else another word.
        edits: whether it changes tensors.
        combines: whether it replaces the sum of several gradients by another one.
        hides: whether it hides gradients from the optimizer.
        takes_any: whether it takes tensors of any dtype and layout, not only numbers that arithmetic is for.
        judges: whether it looks at updates, and may object to them.
        votes: whether what it judges can differ between ranks, so they vote on it.
        measures: whether it needs numbers of whole gradients at the update, also where ranks hold shards.
        then: what follows if it objects: see `Decision`.
    """

    edits = False
    combines = False
    hides = False
    takes_any = False
    judges = False
    votes = False
    measures = False
    then = ""

    def __init__(
        self, rule: Rule, context: Context, indices: tuple[int, ...], compiled: Any
    ) -> None:
        self.rule = rule
        self.context = context
        self.log = context.event_log
        self.indices = indices
        self.compiled = compiled
        self.stats: Sequence[str] = ()
        self.moment: str = rule.point
        # Keys by parameters. Sinks tell rows apart by the identity of their keys.
        self._keys: dict[tuple[int, ...], Mapping[str, tuple[Key, ...]]] = {}

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:  # noqa: ARG002 # of derived effects
        """Act on one tensor, out of place: autograd may share it. Return the tensor that takes its place."""
        return tensor

    def before_pass(self, graph: BackwardGraph) -> None:
        """Look at a backward pass that is about to run."""

    def after_pass(self, done: BackwardPass) -> None:
        """Look at a backward pass that has ended."""

    def act(self, gradients: Gradients, bound: Bound) -> None:
        """Act on the gradients of a moment that the rule matches."""

    def before_step(self, update: WeightUpdate, bound: Bound) -> None:
        """Look at weights before the closure of an optimizer runs, which may move them."""

    def before_unscaling(self, update: WeightUpdate, bound: Bound, scale: float) -> None:
        """Look at gradients that a `GradScaler` is about to unscale, because the script has not."""

    def before_update(self, update: WeightUpdate, bound: Bound) -> None:
        """Look at weights and gradients before traps judge the update."""

    def look(self, update: DueUpdate, bound: Bound) -> Norms:  # noqa: ARG002 # as above
        """Return the numbers by which `judge` judges; the host reads those of all effects together."""
        return ()

    def judge(self, update: DueUpdate, bound: Bound, doubtful: Sequence[int]) -> TrapReport | None:
        """Report what must not reach a weight, given the parameters whose number is not finite."""

    def before_edits(self, update: WeightUpdate, bound: Bound, gradients: Gradients | None) -> None:
        """Look at gradients once they have been judged, before rules at `step` act."""

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        """Look at weights and gradients once the update is over."""

    def at_end(self) -> None:
        """Tell what has not been told when the session ends."""

    def close(self) -> None:
        """Let go of what would keep other objects alive."""

    def has(self, method: str) -> bool:
        """Tell whether a method does something here."""
        return getattr(type(self), method) is not getattr(Effect, method)

    def owned(self, counter: StepCounter) -> tuple[int, ...]:
        """Return the parameters on which it acts in updates of a counter."""
        counters = self.context.counters
        return tuple([index for index in self.indices if counters[index] is counter])

    def bound_to(self, counter: StepCounter) -> Bound:
        indices = self.owned(counter)
        if indices not in self._keys:
            self._keys[indices] = self._new_keys(indices)
        return Bound(self, counter, indices, self._keys[indices])

    def _new_keys(self, indices: tuple[int, ...]) -> Mapping[str, tuple[Key, ...]]:
        rule = self.rule
        names = tuple([self.context.names[index] for index in indices])
        keys = {}
        for stat in self.stats:
            columns = columns_of(stat)
            keys[stat] = tuple([Key(rule.id, column, rule.point, names) for column in columns])
        return keys

    @property
    def decides(self) -> bool:
        """Whether it stops or skips an update at once."""
        return self.then in ("raise", "skip-step")
