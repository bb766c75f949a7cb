"""The effect of checks: it hands a check the facts of each moment, and makes events of its findings."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradsurgeon.actions import Examination, Rule
from gradsurgeon.actions.checks.base import Check, Finding, Model, Pass, Update
from gradsurgeon.actions.checks.ranks_check import topic_of
from gradsurgeon.distributed.replication import Replication
from gradsurgeon.errors import CheckError, shorten_prefix
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.language.planning import slots
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Bound, Effect, WeightUpdate
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.backward_graph import BackwardGraph

_Moment = TypeVar("_Moment", Pass, Update)
# Judges values that have come to the host.
Judge = Callable[[Tensor], Iterable[Finding]]


class ModelFacts:
    """What all checks of a session know of its model."""

    def __init__(self, context: Context, model: nn.Module, kept: KeptCalls) -> None:
        index_of = context.index_of
        holders = {}
        for slot in slots(model):
            if slot.name in index_of:
                holders[index_of[slot.name]] = slot.owner
        self.model = Model(model, holders)
        self.kept = kept
        self._context = context
        self.replication = Replication(
            context.names, lambda: context.ranks, context.parameters.params
        )

    @property
    def reaches_ranks(self) -> bool:
        """Whether there are other ranks. The script may have ended the process group."""
        return self._context.ranks.are_several and _dist.world() > 1

    def passed(self, done: BackwardPass) -> None:
        if self.reaches_ranks:
            self.replication.passed(done.indices, done.averaging)

    def updated(self, counter: StepCounter) -> None:
        if self.reaches_ranks:
            self.replication.updated(counter.indices)


class CheckEffect(Effect):
    """Shows passes and updates to a check. All optimizers share it: some faults show in how their updates alternate."""

    def __init__(
        self,
        rule: Rule,
        context: Context,
        indices: tuple[int, ...],
        examination: Examination,
        facts: ModelFacts,
    ) -> None:
        super().__init__(rule, context, indices, None)
        self.moment = "check"
        self.check = examination.check
        self._raises = examination.then == "raise"
        self._facts = facts
        self._topic = topic_of(rule.id, context.names)
        # The findings that were reported: cause and name.
        self._reported: set[tuple[str, str]] = set()

    def has(self, method: str) -> bool:
        # Each update counts as a firing.
        if method == "before_update" or not hasattr(Check, method):
            return super().has(method)
        return self.has_own(method)

    def has_own(self, method: str) -> bool:
        return getattr(type(self.check), method) is not getattr(Check, method)

    def owned(self, counter: StepCounter) -> tuple[int, ...]:
        """Return the parameters that the optimizer of a counter owns, or that no optimizer owns."""
        counters = self.context.counters
        holders = (counter, counters.common)
        return tuple([index for index in self.indices if counters[index] in holders])

    def close(self) -> None:
        """Release the check: it may hold parameters of other models."""
        self.check.close()
        self.check = Check()

    def before_pass(self, graph: BackwardGraph, bound: Bound) -> None:
        if self._leads(bound):
            self._show(self.check.before_pass, self._pass(bound, (), graph))

    def after_pass(self, done: BackwardPass, bound: Bound) -> None:
        if self._leads(bound) and not set(done.indices).isdisjoint(self.indices):
            self._show(self.check.after_pass, self._pass(bound, done.indices, done.graph))

    def _leads(self, bound: Bound) -> bool:
        """Return whether a counter is that of the first parameter, by which passes are numbered."""
        return self.context.counters[self.indices[0]] is bound.counter

    def _pass(self, bound: Bound, reached: Sequence[int], graph: BackwardGraph | None) -> Pass:
        facts = self._facts_of(bound.counter.step)
        unregistered = partial(_unregistered, graph, self.context)
        return Pass(**facts, reached=reached, graph=graph, unregistered=unregistered)

    def before_unscaling(self, update: WeightUpdate, bound: Bound, scale: float) -> None:
        self._show(self.check.before_unscaling, self._update(update, bound, scale=scale))

    def before_update(self, update: WeightUpdate, bound: Bound) -> None:
        self.log.count_fired(self.rule.id, bound.counter.step)
        if self.has_own("before_update"):
            self._show(self.check.before_update, self._update(update, bound))

    def before_edits(self, update: WeightUpdate, bound: Bound, gradients: Gradients | None) -> None:
        facts: dict[str, Any] = {"has_moved": update.has_moved}
        if gradients is not None:
            facts["known_norms"] = gradients.known_norms
        self._show(self.check.before_edits, self._update(update, bound, **facts))

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        facts = {"took_place": update.took_place, "frozen": update.hidden_by}
        self._show(self.check.after_update, self._update(update, bound, **facts))

    def _show(self, look: Callable[[_Moment], Iterable[Finding]], moment: _Moment) -> None:
        with torch.no_grad():
            self._report(moment.step, look(moment))
        # A function that waits for values may hold the moment. It looks tensors up again.
        vars(moment).pop("params", None)
        vars(moment).pop("grads", None)

    def at_end(self) -> None:
        with torch.no_grad():
            self._report(self.context.counters.latest, self.check.at_end())

    def _update(self, update: WeightUpdate, bound: Bound, **facts: Any) -> Update:
        topic = ""
        if self._facts.reaches_ranks:
            topic = self._topic
        return Update(
            **self._facts_of(bound.counter.step),
            indices=bound.indices,
            owner=bound.counter,
            optimizer=update.optimizer(),
            evaluations=self._facts.kept.evaluations,
            topic=topic,
            find_replicas=self._facts.replication.replicas,
            **facts,
        )

    def _facts_of(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "members": self.indices,
            "model": self._facts.model,
            "find": self.context.parameters.params,
            "later": partial(self._later, step),
        }

    def _later(self, step: int, values: Tensor, judge: Judge) -> None:
        # Values travel flat. The step may be over when they arrive.
        shape = values.shape

        def tell(flat: Tensor) -> None:
            with torch.no_grad():
                self._report(step, judge(flat.view(shape)))

        self.log.when_read(values.detach(), tell)

    def _report(self, step: int, findings: Iterable[Finding]) -> None:
        """Make events of findings, each cause once for each tensor; errors are raised at the next update."""
        for finding in findings:
            names = [*self.context.names_of(finding.indices), *finding.names]
            # A finding on the whole model names nothing.
            if not names:
                names.append("")
            news = [name for name in names if (finding.cause, name) not in self._reported]
            self._reported.update((finding.cause, name) for name in news)
            if news:
                self._emit(finding, news, step)

    def _emit(self, finding: Finding, names: Sequence[str], step: int) -> None:
        if finding.step is not None:
            step = finding.step
        it = "it"
        if len(names) > 1:
            it = "them"
        rule = self.rule.id
        text = finding.text.format(names=shorten_prefix(names), it=it)
        message = f"{self.context.place(step, rule)}: {text}"
        self.log.count_changed(rule, 1)
        self.log.emit("check", message, rule=rule, step=step, name=names[0])
        if self._raises:
            error = CheckError(message, rule=rule, step=step, rank=_dist.rank(), name=names[0])
            self.log.raise_later(error)


def _unregistered(graph: BackwardGraph | None, context: Context) -> list[Tensor]:
    """Return the trained leaves that a pass reached, and that are no parameters of the model."""
    if graph is None:
        return []
    known = set(context.parameters.ids())
    # Other leaves, such as points at which a derivative is taken, are inputs.
    params = [leaf for leaf in graph.leaves() if isinstance(leaf, nn.Parameter)]
    return [param for param in params if id(param) not in known]
