"""An effect: what one rule does, moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.actions import EditRule, Observer, Rule
from gradsurgeon.records.store import Key
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.device_outcome import DeviceOutcome
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.runtime.update import Judged, JudgedUpdate
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.measure import Norms
from gradsurgeon.tensors.sent_norms import is_any_nonfinite
from gradsurgeon.tensors.statistics import columns_of


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

    def has(self, method: str) -> bool:
        return self.effect.has(method, self.counter)

    def columns(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the columns of some of the parameters in a record; ``indices`` are in the order of the record."""
        return places_among(self.indices, indices)


def places_among(members: Sequence[int], indices: Sequence[int]) -> Sequence[int]:
    """Return the places of some of the members, which are in the order of the members."""
    if len(indices) == len(members):
        return range(len(indices))
    places = {index: place for place, index in enumerate(members)}
    return [places[index] for index in indices]


class Effect:
    """What one rule does. Each method may be left out.

    A rule has one effect, for all optimizers. It knows by parameter what it has seen, so nothing moves when one claims parameters.

    Attributes:
        indices: the parameters that the rule matches.
        compiled: what the rule compiles to.
        keeps_zero, may_overflow: whether a zero stays a zero, and whether a finite gradient can become non-finite.
        stats: the statistics that it records.
        moment: when it acts: on the gradients of a moment at `accumulated` and `step`, on single tensors at `forward` and
            `backward`, else around updates (`updated`, `check`) or on several gradients (`losses`). A trap has the moment at
            which its numbers are measured, and always judges right before the update.
        edits: whether it changes tensors.
        combines: whether it replaces the sum of several gradients by another one.
        hides, holds: whether it hides gradients from the optimizer, and keeps weights as they are while others are updated.
        takes_any: whether it takes tensors of any dtype and layout, not only numbers that arithmetic is for.
        judges: whether it looks at updates, and may object to them.
        searches: whether it searches gradients for non-finite elements.
        defers: whether the device can decide, because what `look` returns tells by itself.
        votes: whether what it judges can differ between ranks, so they vote on it.
        measures: whether it needs numbers of whole gradients at the update, also where ranks hold shards.
        records: whether it records numbers, so that the loss and the learning rates are recorded with them, or needs the loss.
        asks_host: whether the host must know in time if the update takes place, so that the device cannot decide.
        then: what follows if it objects: see `Decision`.
    """

    edits = False
    combines = False
    hides = False
    holds = False
    takes_any = False
    judges = False
    searches = False
    defers = False
    votes = False
    measures = False
    records = False
    asks_host = False
    then = ""

    def __init__(
        self, rule: Rule, context: Context, indices: tuple[int, ...], compiled: Any
    ) -> None:
        self.rule = rule
        self.context = context
        self.log = context.event_log
        self.count_fired = partial(self.log.count_fired, rule.id)
        self.count_changed = partial(self.log.count_changed, rule.id)
        self.emit = partial(self.log.emit, rule=rule.id)
        self.notice_once = partial(self.log.notice_once, rule=rule.id)
        self.indices = indices
        self.compiled = compiled
        # The rule, if some of its numbers change with the step.
        self._ramped = rule if isinstance(rule, EditRule) and rule.ramps else None
        self._compiled_step = rule.steps.from_
        self.keeps_zero = rule.keeps_zero
        self.may_overflow = rule.may_overflow
        self.stats: Sequence[str] = compiled.statistics if isinstance(compiled, Observer) else ()
        self.moment: str = rule.point
        self.prepare()

    def prepare(self) -> None:
        """Make what a derived effect keeps."""

    def compiled_at(self, step: int) -> Any:
        """Return what the rule compiles to in an update: some numbers change with it."""
        if self._ramped is not None and step != self._compiled_step:
            self.compiled = self._ramped.in_step(step).compile()
            self._compiled_step = step
        return self.compiled

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:  # noqa: ARG002 # of derived effects
        """Act on one tensor, out of place: autograd may share it. Return the tensor that takes its place."""
        return tensor

    def before_pass(self, graph: BackwardGraph, bound: Bound) -> None:
        """Look at a backward pass that is about to run."""

    def after_pass(self, done: BackwardPass, bound: Bound) -> None:
        """Look at a backward pass that has ended."""

    def act(self, gradients: Gradients, bound: Bound) -> None:
        """Act on the gradients of a moment that the rule matches."""

    def before_step(self, update: WeightUpdate, bound: Bound) -> None:
        """Look at weights before the closure of an optimizer runs, which may move them."""

    def before_unscaling(self, update: WeightUpdate, bound: Bound, scale: float) -> None:
        """Look at gradients that a `GradScaler` is about to unscale, because the script has not."""

    def before_update(self, update: WeightUpdate, bound: Bound) -> None:
        """Look at weights and gradients before traps judge the update."""

    def look(self, update: JudgedUpdate, bound: Bound) -> Norms:  # noqa: ARG002 # as above
        """Return the numbers by which `judge` judges; the host reads those of all effects together.

        One that is not finite says that a gradient must not reach a weight, or may not. Parameters of other rules can be among them.
        """
        return ()

    def judge(self, update: Judged, bound: Bound, doubtful: Sequence[int]) -> TrapReport | None:
        """Report what must not reach a weight, given the parameters whose number is not finite; called if there are any."""

    def foresee(self, update: Judged, bound: Bound, doubtful: Sequence[int]) -> TrapReport | None:
        """Report after a backward pass, for the vote of the ranks, what would be reported at the update."""
        return self.judge(update, bound, doubtful)

    def objection(self, update: Judged, bound: Bound, norms: Norms) -> Tensor:  # noqa: ARG002 # as above
        """Return whether the update must not reach a weight, 0-dim and bool, given what `look` returned. Does not wait."""
        return is_any_nonfinite(norms)

    def before_edits(self, update: WeightUpdate, bound: Bound, gradients: Gradients | None) -> None:
        """Look at gradients once they have been judged, before rules at `step` act."""

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        """Look at weights and gradients once the update is over."""

    def at_end(self) -> None:
        """Report the rest when the session ends."""

    def close(self) -> None:
        """Release the objects that the effect would keep alive."""

    def has(self, method: str, counter: StepCounter) -> bool:  # noqa: ARG002 # of derived effects
        """Return whether a method does something here in updates of a counter."""
        return getattr(type(self), method) is not getattr(Effect, method)

    def owned(self, counter: StepCounter) -> tuple[int, ...]:
        """Return the parameters on which it acts in updates of a counter."""
        counters = self.context.counters
        return tuple([index for index in self.indices if counters[index] is counter])

    def bound_to(self, counter: StepCounter) -> Bound:
        """Bind the effect to its parameters of a counter, with new keys: the identity of the keys distinguishes queued rows."""
        rule = self.rule
        indices = self.owned(counter)
        names = tuple(self.context.names_of(indices))
        keys = {}
        for stat in self.stats:
            columns = columns_of(stat)
            keys[stat] = tuple([Key(rule.id, column, rule.point, names) for column in columns])
        return Bound(self, counter, indices, keys)

    @property
    def decides(self) -> bool:
        """Whether it stops or skips an update at once."""
        return self.then in ("raise", "skip-step")


# Each effect that judged an update, with its report if it tripped.
Findings = dict[Effect, TrapReport | None]


class Due:
    """The effects that are due for one counter in one step, in the order in which they act.

    Attributes:
        accumulated: those that act on gradients after a backward pass.
        at_step: those that act right before the update.
        judges: those that judge the update.
        watched: the parameters whose gradients matter after a backward pass.
        normed: those of them of whose gradients an effect needs the norm.
        trapped: the parameters whose gradients are searched for non-finite elements.
        final: the parameters whose gradients are judged or edited at the update.
        shows_assigned: whether the gradients at the update show those that no pass has reached.
        edited: the parameters whose gradients are edited at the update.
        hidden_by: by parameter that the optimizer does not find, the rule that hides it.
        judges_edits: whether traps judge again what edits made of gradients.
        may_object: whether an effect may object to the update.
        keeps_passes: whether its report may need what backward passes have left.
        checks: the ids of check rules, which fire in each update.
        records: whether an effect records numbers.
        is_left_to_device: whether the device decided on the last such update, so ranks do not vote on the next one.
        before_pass and the other moments around passes and updates: those that do something in the method of this name.
    """

    def __init__(self, bound: Sequence[Bound]) -> None:
        self.bound = bound
        after_backward = self._at("accumulated")
        self.accumulated = [each for each in after_backward if each.has("act")]
        self.at_step = [each for each in self._at("step") if each.has("act")]
        self.checks = [each.rule.id for each in self._at("check")]
        self.is_left_to_device = False
        self.judges = [each for each in bound if each.effect.judges]
        traps = [each for each in self.judges if each.effect.searches]
        normed = [each for each in after_backward if "l2" in each.keys]
        # The loss does not show in gradients.
        of_gradients = [each for each in self.judges if each.effect.measures or each in traps]
        self.may_object = any(not each.effect.edits for each in self.judges)
        self.keeps_passes = self.may_object and bool(of_gradients)
        self.records = any(each.effect.records for each in bound)
        self.watched = _indices_of(after_backward)
        self.trapped = _indices_of(traps)
        self.normed = _indices_of([*traps, *normed])
        self.final = _indices_of([*of_gradients, *self.at_step])
        self.shows_assigned = bool(self.accumulated) and self.final == self.watched
        self.edited = frozenset(_indices_of([each for each in self.at_step if each.effect.edits]))
        self.judges_edits = bool(traps) and any(each.effect.may_overflow for each in self.at_step)
        self.hidden_by: dict[int, str] = {}
        for each in self.at_step:
            if each.effect.hides:
                self.hidden_by.update(dict.fromkeys(each.indices, each.rule.id))
        self.before_pass = self._having("before_pass")
        self.after_pass = self._having("after_pass")
        self.before_step = self._having("before_step")
        self.before_unscaling = self._having("before_unscaling")
        self.before_update = self._having("before_update")
        self.before_edits = self._having("before_edits")
        self.after_update = self._having("after_update")

    def _at(self, moment: str) -> list[Bound]:
        return [each for each in self.bound if each.effect.moment == moment]

    def _having(self, method: str) -> list[Bound]:
        return [each for each in self.bound if each.has(method)]


def _indices_of(bound: Iterable[Bound]) -> tuple[int, ...]:
    indices: set[int] = set()
    for each in bound:
        indices.update(each.indices)
    return tuple(sorted(indices))


NOTHING_DUE = Due(())


@dataclass(slots=True, eq=False)
class WeightUpdate:
    """One update, from the call of the optimizer to its end."""

    # The counter of the optimizer, or the common counter if the script updates weights by hand.
    counter: StepCounter
    due: Due = NOTHING_DUE
    # The scale on the gradients that a fused optimizer gets.
    scale: Tensor | None = None
    # The host learns this right before the next update if only the device knows whether this update takes place.
    outcome: DeviceOutcome | None = None
    # The flag of a `GradScaler` that the host reads together with the numbers of traps.
    unread: DeviceOutcome | None = None
    # Traps gave this rank's vote on it.
    is_voted_on: bool = True
    # The scale under which the gradients overflowed, so the scaler skips the update.
    overflowed: Tensor | None = None
    # The update takes place inside a backward pass, on the gradients so far.
    inside: bool = False
    # The script updates weights itself.
    by_hand: bool = False
    # The optimizer may have moved weights in this step already: it evaluates its closure late, or several times.
    has_moved: bool = False
    # Traps skip the update, or raise.
    stopped: bool = False
    # The optimizer has returned, or a trap raises in its place.
    returned: bool = False
    # The optimizer did its update, as far as that is known after it: neither it nor a trap has raised, and no trap skips it.
    took_place: bool = False
    # Maps each hidden parameter to the rule that hides it.
    hidden_by: Mapping[int, str] = field(default_factory=dict)
    # Maps each parameter with held elements to those that may change, once the update is over.
    trains: dict[int, Tensor] = field(default_factory=dict)
    # The step has raised, and its error is on its way to the script.
    raised: bool = False
    optimizer: Callable[[], Optimizer | None] = lambda: None
