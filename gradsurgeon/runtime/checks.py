"""Runs the checks of a session: hands them facts, and makes events of their findings."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradsurgeon.actions import Examination
from gradsurgeon.actions.checks.base import Check, Finding, Model, Pass, Update
from gradsurgeon.actions.checks.ranks_check import topic_of
from gradsurgeon.distributed.replication import Replication
from gradsurgeon.errors import CheckError, shorten_names
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.language.compiler import Stage
from gradsurgeon.language.planning import slots
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.training_events import BackwardPass, WeightUpdate
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.backward_graph import BackwardGraph


@dataclass(frozen=True, slots=True)
class _Running:
    stage: Stage
    check: Check
    raises: bool
    members: frozenset[int]


class Checks:
    """The checks of a session. Without any it does nothing."""

    def __init__(self, context: Context, model: nn.Module, kept: KeptCalls) -> None:
        self._context, self._kept = context, kept
        compiled = [(stage, stage.rule.compile()) for stage in context.program.checks]
        running = [
            _Running(stage, effect.check, effect.then == "raise", frozenset(stage.indices))
            for stage, effect in compiled
            if isinstance(effect, Examination)
        ]
        # The checks that have a method of their own, by its name; all of them by no name.
        self._having = {"": running} | {
            name: [one for one in running if getattr(type(one.check), name) is not method]
            for name, method in vars(Check).items()
            if callable(method)
        }
        self._told: set[tuple[str, str, Hashable]] = set()
        self._owned_indices: dict[tuple[str, StepCounter], tuple[int, Sequence[int]]] = {}
        if running:
            numbers = {name: number for number, name in enumerate(context.program.names)}
            found = [slot for slot in slots(model) if slot.name in numbers]
            self._model = Model(model, {numbers[slot.name]: slot.owner for slot in found})
            rules = [one.stage.rule.id for one in running]
            self._topics = {rule: topic_of(rule, context.program.names) for rule in rules}
            self._replication = Replication(
                context.program.names, lambda: context.ranks, context.parameters.params
            )

    def close(self) -> None:
        """Let go of the checks: they may keep parameters of other models."""
        self._having = {name: [] for name in self._having}

    def before_pass(self, graph: BackwardGraph) -> None:
        self._look_at_pass("before_pass", (), graph)

    def after_pass(self, done: BackwardPass) -> None:
        if self._having["before_edits"] and _dist.world() > 1:
            self._replication.passed(done.indices, done.averaging)
        self._look_at_pass("after_pass", done.indices, done.graph)

    def _look_at_pass(
        self, method: str, reached: Sequence[int], graph: BackwardGraph | None
    ) -> None:
        def unregistered() -> list[Tensor]:
            known = set(self._context.parameters.ids())
            # Other leaves, such as points at which a derivative is taken, are inputs.
            leaves = [] if graph is None else graph.leaves()
            return [one for one in leaves if isinstance(one, nn.Parameter) and id(one) not in known]

        for running, counter in self._due(method):
            if method == "before_pass" or not running.members.isdisjoint(reached):
                facts = self._facts(running, counter)
                moment = Pass(**facts, reached=reached, graph=graph, unregistered=unregistered)
                self._tell(running, moment.step, getattr(running.check, method)(moment))

    def before_unscaling(
        self, counter: StepCounter, optimizer: Optimizer, scaler: GradScaler
    ) -> None:
        """Look at gradients that a scaler is about to unscale, because the script has not."""
        states = scaler._per_optimizer_states  # noqa: SLF001 # no public name tells
        if self._having["before_unscaling"] and states[id(optimizer)]["stage"] is OptState.READY:
            self._look("before_unscaling", counter, optimizer, scale=scaler.get_scale())

    def before_update(self, step: WeightUpdate) -> None:
        for running, counter in self._due("", step.counter):
            self._context.event_log.count_fired(running.stage.rule.id, counter.step)
        self._look("before_update", step.counter, step.optimizer())

    def before_edits(self, step: WeightUpdate, gradients: Gradients | None) -> None:
        facts: dict[str, Any] = {"has_moved": step.has_moved}
        if gradients is not None:
            facts["known_norms"] = gradients.known_norms
        self._look("before_edits", step.counter, step.optimizer(), **facts)

    def after_update(self, step: WeightUpdate, *, took_place: bool) -> None:
        context = self._context
        freezes = context.program.freezes if context.mode == "act" else ()
        due = [stage for stage in freezes if context.schedule.due(stage.rule, step.counter.step)]
        frozen = {index: stage.rule.id for stage in due for index in stage.indices}
        facts = {"took_place": took_place, "frozen": frozen}
        self._look("after_update", step.counter, step.optimizer(), **facts)
        if self._having[""]:
            self._replication.updated(step.counter.indices)

    def conclude(self) -> None:
        """Let the checks tell what they know so far. More may come."""
        for running in self._having["at_end"]:
            self._tell(running, self._context.counters.latest, running.check.at_end())

    def _due(
        self, method: str, counter: StepCounter | None = None
    ) -> list[tuple[_Running, StepCounter]]:
        """Return the due checks that have a method; without a counter, by that of their first parameter."""
        due, context = [], self._context
        for one in () if context.paused else self._having[method]:
            clock = counter or context.counters[one.stage.indices[0]]
            if context.schedule.due(one.stage.rule, clock.step):
                due.append((one, clock))
        return due

    def _look(
        self, method: str, counter: StepCounter, optimizer: Optimizer | None, **facts: Any
    ) -> None:
        several = _dist.world() > 1
        for running, _ in self._due(method, counter):
            if indices := self._owned(running.stage, counter):
                update = Update(
                    **self._facts(running, counter),
                    indices=indices,
                    owner=counter,
                    optimizer=optimizer,
                    evaluations=self._kept.evaluations,
                    topic=self._topics[running.stage.rule.id] if several else "",
                    find_replicas=self._replication.replicas,
                    **facts,
                )
                self._tell(running, update.step, getattr(running.check, method)(update))

    def _facts(self, running: _Running, counter: StepCounter) -> dict[str, Any]:
        context, step = self._context, counter.step

        def later(values: Tensor, judge: Callable[[Tensor], Iterable[Finding]]) -> None:
            # Values travel flat. The step may be over when they arrive.
            shape = values.shape
            context.event_log.when_read(
                values.detach(), lambda flat: self._tell(running, step, judge(flat.view(shape)))
            )

        return {
            "step": step,
            "members": running.stage.indices,
            "model": self._model,
            "find": context.parameters.param,
            "later": later,
        }

    def _owned(self, stage: Stage, counter: StepCounter) -> Sequence[int]:
        """Return the parameters of a rule that the optimizer of a counter owns, or that no optimizer owns."""
        counters = self._context.counters
        version, indices = self._owned_indices.get((stage.rule.id, counter), (-1, ()))
        if version != counters.version:
            known = (counter, counters.common)
            indices = [index for index in stage.indices if counters[index] in known]
            self._owned_indices[stage.rule.id, counter] = counters.version, indices
        return indices

    def _tell(self, running: _Running, step: int, findings: Iterable[Finding]) -> None:
        """Make events of findings, each cause once for each tensor; errors are raised at the next update."""
        context, rule = self._context, running.stage.rule.id
        for finding in findings:
            places: Sequence[Hashable] = finding.indices or (finding.names,)
            news = [place for place in places if (rule, finding.cause, place) not in self._told]
            if not news:
                continue
            self._told.update((rule, finding.cause, place) for place in news)
            names = context.program.names
            told = [names[index] for index in finding.indices if index in news] or finding.names
            it = "them" if len(told) > 1 else "it"
            text = finding.text.format(names=shorten_names(told), it=it)
            event_log, name = context.event_log, told[0] if told else ""
            at = step if finding.step is None else finding.step
            message = f"{context.place(at, rule)}: {text}"
            event_log.count_changed(rule, 1)
            event_log.emit("check", message, rule=rule, step=at, name=name)
            if running.raises:
                event_log.raise_later(
                    CheckError(message, rule=rule, step=at, rank=_dist.rank(), name=name)
                )
