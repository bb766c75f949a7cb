"""The effect of checks: it hands a check the facts of each moment, and makes events of its findings."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradsurgeon.actions import Examination
from gradsurgeon.actions.checks.base import (
    Check,
    Finding,
    Findings,
    LossSource,
    Model,
    Pass,
    Update,
)
from gradsurgeon.actions.checks.ranks_check import topic_of
from gradsurgeon.common.diagnosis import Line
from gradsurgeon.distributed.replication import Replication
from gradsurgeon.errors import CheckError, shorten_prefix
from gradsurgeon.forensics import diagnose_loss
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.forensics.kept_step import KeptLoss, fingerprint
from gradsurgeon.language.planning import slots
from gradsurgeon.runtime import device_outcome
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Bound, Effect, WeightUpdate
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.loss_line_event import await_line, blamed_in
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist, _torch
from gradsurgeon.tensors.backward_graph import BackwardGraph

_Moment = TypeVar("_Moment", Pass, Update)
_OF_PASSES = ("before_pass", "after_pass")
_LOOKED_UP = ("params", "originals", "grads")
# Judges values that have come to the host.
Judge = Callable[[Tensor], Findings]


class CheckEffect(Effect):
    """Shows passes and updates to a check. All optimizers share it: some faults show in how their updates alternate."""

    compiled: Examination

    def prepare(self) -> None:
        self.moment = "check"
        self.check = self.compiled.check
        self._raises = self.compiled.then == "raise"
        self._topic = topic_of(self.rule.id, self.context.names)
        # The findings that were reported: cause and name.
        self._reported: set[tuple[str, str]] = set()
        # Facts whose line a pass may still show, with what makes an event of each.
        self._waiting_facts: dict[str, Callable[[str], object]] = {}

    def know(self, model: Model, kept: KeptCalls, replication: Replication) -> None:
        self._kept = kept
        self._replication = replication
        parameters = self.context.parameters
        # Every moment gets these arguments.
        self._always: dict[str, Any] = {
            "members": self.indices,
            "model": model,
            "find": parameters.params,
            "find_weights": parameters.weights,
            "find_grads": parameters.grads,
        }

    def has(self, method: str, counter: StepCounter) -> bool:
        if not hasattr(Check, method):
            return super().has(method, counter)
        # All optimizers share a pass: the counter of the first parameter numbers it.
        if method in _OF_PASSES and self.context.counters[self.indices[0]] is not counter:
            return False
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
        if not self.check.rests("before_pass"):
            self._show(self.check.before_pass, self._pass(bound, (), graph))

    def after_pass(self, done: BackwardPass, bound: Bound) -> None:
        if self.check.compares_ranks and not self.context.reaches_ranks:
            return
        if set(done.indices).isdisjoint(self.indices):
            return
        moment = self._pass(bound, done.indices, done.graph)
        moment.scale = done.scale
        moment.inputs = partial(_inputs_of, self._kept)
        loss = self._kept.loss_of_pass
        if loss is not None:
            moment.source_in_loss = partial(_source_in, loss, moment.step)
        self._show(self.check.after_pass, moment)

    def _pass(self, bound: Bound, reached: Sequence[int], graph: BackwardGraph | None) -> Pass:
        parameters = self.context.parameters
        facts = {**self._always, "find_weights": parameters.params}
        if parameters.elsewhere is not None:
            facts["find_grads"] = _nothing  # they come later
        step = bound.counter.step
        return Pass(
            step=step,
            later=partial(self._later, step),
            reached=reached,
            graph=graph,
            unregistered=partial(_unregistered, graph, self.context),
            **facts,
        )

    def before_unscaling(self, update: WeightUpdate, bound: Bound, scale: float) -> None:
        self._show(self.check.before_unscaling, self._update(update, bound, scale=scale))

    def before_update(self, update: WeightUpdate, bound: Bound) -> None:
        if self.check.rests("before_update"):
            return
        optimizer = update.optimizer()
        scale_of_step = self.context.scaling.scale_of_step
        by_scaler = optimizer is not None and scale_of_step(optimizer) is not None
        moment = self._update(update, bound, by_scaler=by_scaler)
        self._show(self.check.before_update, moment)

    def before_edits(self, update: WeightUpdate, bound: Bound, gradients: Gradients | None) -> None:
        has_ranks = self.context.reaches_ranks
        if self.check.compares_ranks and not has_ranks:
            return
        facts: dict[str, Any] = {"has_moved": update.has_moved}
        if has_ranks:
            facts["topic"] = self._topic
        if self.context.parameters.elsewhere is None:  # an engine keeps each part on one rank
            facts["find_replicas"] = self._replication.replicas
        if gradients is not None:
            facts["known_norms"] = gradients.known_norms
        moment = self._update(update, bound, **facts)
        with torch.no_grad():
            self._show(self.check.before_edits, moment)

    def after_update(self, update: WeightUpdate, bound: Bound) -> None:
        when_known = partial(device_outcome.when_known, update.outcome, update.took_place)
        facts = {"when_known": when_known, "frozen": update.hidden_by}
        self._show(self.check.after_update, self._update(update, bound, **facts))

    def _update(self, update: WeightUpdate, bound: Bound, **facts: Any) -> Update:
        step = bound.counter.step
        return Update(
            step=step,
            later=partial(self._later, step),
            indices=bound.indices,
            owner=bound.counter,
            optimizer=update.optimizer(),
            evaluations=self._kept.evaluations,
            **self._always,
            **facts,
        )

    def _show(self, look: Callable[[_Moment], Findings], moment: _Moment) -> None:
        for finding in look(moment):
            self._report(finding, moment.step)
        # A function that waits for values may hold the moment. It looks tensors up again.
        facts = moment.__dict__
        for name in _LOOKED_UP:
            if name in facts:
                del facts[name]

    @_torch.without_grad
    def at_end(self) -> None:
        for finding in self.check.at_end():
            self._report(finding, self.context.counters.latest)
        while self._waiting_facts:
            text, tell = self._waiting_facts.popitem()
            tell(text)

    def _later(self, step: int, values: Tensor, judge: Judge) -> None:
        # Values travel flat. The step may be over when they arrive.
        self.log.when_read(values.detach(), partial(self._judge, step, judge, values.shape))

    @_torch.without_grad
    def _judge(self, step: int, judge: Judge, shape: torch.Size, values: Tensor) -> None:
        for finding in judge(values.view(shape)):
            self._report(finding, step)

    def _report(self, finding: Finding, step: int) -> None:
        """Make an event of a finding, each cause once for each tensor; errors are raised at the next update."""
        names = [*self.context.names_of(finding.indices), *finding.names]
        # A finding on the whole model names nothing.
        if not names:
            names.append("")
        news = [name for name in names if (finding.cause, name) not in self._reported]
        for name in news:
            self._reported.add((finding.cause, name))
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
        if finding.is_fact:
            tell = partial(self.emit, "fact", step=step, name=names[0])
            self._tell_fact(text, finding.source, tell)
            return
        message = f"{self.context.place(step, rule)}: {text}"
        self.count_changed(1)
        keys = {}
        source = finding.source
        if source is not None:
            if source.diagnosis is not None:
                keys["diagnosis"] = source.diagnosis.to_json()
            if not self._raises:
                line = self._kept.loss_line
                await_line(line, source, self.context, rule, step, warns=False)
        self.emit("check", message, step=step, name=names[0], facts=keys)
        if self._raises:
            error = CheckError(message, rule=rule, step=step, rank=_dist.rank(), name=names[0])
            self.log.raised.append(error)

    def _tell_fact(
        self, text: str, source: LossSource | None, tell: Callable[[str], object]
    ) -> None:
        """Make an event of a fact, if it blames an operation as soon as a pass has shown the line of that."""
        if source is None:
            tell(text)
            return
        self._waiting_facts[text] = tell
        name = source.nodes[source.place].name

        def tell_with_line(lines: tuple[Line, ...], _differentiated: str) -> None:
            if self._waiting_facts.pop(text, None) is not None:
                place = f"{name} at {lines[0].file}:{lines[0].line}"
                tell(text.replace(name, place, 1))

        line = self._kept.loss_line
        line.wait_for(source.nodes, source.place, source.pass_key, tell_with_line)


def model_of(model: nn.Module, context: Context) -> Model:
    """Return a model as checks see it."""
    holders = {}
    for slot in slots(model):
        if slot.name in context.index_of:
            holders[context.index_of[slot.name]] = slot.owner
    return Model(model, holders)


def _nothing(_indices: Sequence[int]) -> Any:
    return ()


def _source_in(loss: KeptLoss, step: int) -> LossSource | None:
    diagnosis = diagnose_loss(loss, step)
    if diagnosis is None:
        return None
    return blamed_in(loss, diagnosis)


def _inputs_of(kept: KeptCalls) -> list[Tensor]:
    samples = []
    for call in kept.step.calls[-1:]:
        for tensor in call.inputs.values():
            known = fingerprint(tensor)
            if known is not None:
                samples.append(known[1])
    return samples


def _unregistered(graph: BackwardGraph | None, context: Context) -> list[Tensor]:
    """Return the trained leaves that a pass reached, and that are no parameters of the model."""
    if graph is None:
        return []
    known = set(context.parameters.ids())
    unregistered = []
    for leaf in graph.leaves():
        # Other leaves, such as points at which a derivative is taken, are inputs.
        is_parameter = isinstance(leaf, nn.Parameter)
        if is_parameter and id(leaf) not in known:
            unregistered.append(leaf)
    return unregistered
