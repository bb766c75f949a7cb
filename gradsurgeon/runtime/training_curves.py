"""The loss and the learning rates of each update, recorded wherever a rule records norms of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.actions import ObserverRule, Rule
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.recorder import Recorder
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.memory import LOSS, RATE, WholeSeries
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.runtime.step_counters import StepCounter, StepCounters
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.backward_graph import BackwardGraph

# Backward passes that wait for their update.
_MOST_WAITING = 4096
# Groups whose learning rates are recorded: a script may make an optimizer for each parameter.
_MOST_GROUPS = 64
# An unchanged learning rate is recorded again after so many updates: memory is bounded, and drops the oldest rows.
_REPEATED = 100
# Updates before a failed one whose losses its diagnosis tells.
_BEFORE = 20
_MOST_TOLD = 3


class _Loss(NamedTuple):
    """The loss of one backward pass, in true units; losses of one forward pass have different numbers."""

    indices: Sequence[int]
    number: int
    value: Tensor


class TrainingCurves:
    """Records losses and learning rates under the first rule that records norms in every step, or else the first.

    `Lookup` finds them under each rule.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        recorder: Recorder,
        counters: StepCounters,
        names: Sequence[str],
    ) -> None:
        self._rule = ""
        has_always = False
        for rule in rules:
            if isinstance(rule, ObserverRule) and rule.target == "params" and not has_always:
                has_always = rule.steps.always
                if has_always or not self._rule:
                    self._rule = rule.id
        self._recorder = recorder
        self._counters = counters
        self._names = names
        # The losses of the running pass, until they are taken, and the number of the first.
        self._running: Sequence[Tensor] = ()
        self._number = 0
        # The number of the next node of a graph when the last pass began.
        self._begun = 0
        self._waiting: list[_Loss] = []
        # The losses that feed the update under way, by name.
        self.feeding: dict[str, Tensor] = {}
        # The names of losses and optimizers, by counter and by what they are called alone.
        self._known: dict[tuple[StepCounter, str], str] = {}
        # The last learning rate by group, and its update.
        self._rates: dict[str, tuple[object, int]] = {}

    def began(self, graph: BackwardGraph) -> None:
        if self._running is graph.losses:
            return  # another optimizer
        # A loss of parts from before the last pass is another one; a loss computed since is of a micro-batch.
        is_another = bool(self._waiting) and graph.began_before(self._begun)
        self._number = self._waiting[-1].number + 1 if is_another else 0
        self._begun = _torch.next_node_number()
        self._running = graph.losses

    def passed(self, done: BackwardPass) -> None:
        # FSDP keeps the gradients of earlier passes elsewhere.
        if self._running and done.graph is not None:
            # If gradients were cleared since their pass, it feeds no update.
            waiting = [loss for loss in self._waiting if not done.had.isdisjoint(loss.indices)]
            self._waiting = waiting[-_MOST_WAITING:]
        self._take(done.indices, done.scale)

    def _take(self, indices: Sequence[int], scale: Tensor | None) -> None:
        for number, value in enumerate(self._running, self._number):
            # The script may write to its own.
            copied = value.to(torch.float32, copy=True)
            self._waiting.append(_Loss(indices, number, unscaled(copied, scale)))
        self._running = ()

    def updating(self, counter: StepCounter, optimizer: Optimizer | None) -> None:
        """Record the losses that feed an update, and the learning rates of its optimizer, once per update."""
        self.feeding = {}
        is_new = counter.recorded != counter.step
        if not is_new and not self._waiting:
            return
        counter.recorded = counter.step
        if self._running and _torch.graph_task() != -1:
            # The optimizer steps inside the pass, as may others.
            self._take(counter.indices, None)
        losses = self.so_far(counter)
        updated = set(counter.indices)
        self._waiting = [loss for loss in self._waiting if updated.isdisjoint(loss.indices)]
        # An optimizer may evaluate its closure several times: its `step` returns the first loss.
        if not is_new:
            return
        self.feeding = losses
        for name, value in losses.items():
            self._record(LOSS, name, counter.step, value, is_copy=True)
        if optimizer is not None:
            self._record_rates(counter, optimizer)

    def so_far(self, counter: StepCounter) -> dict[str, Tensor]:
        """Return by name the losses that feed the next update, summed over its micro-batches so far."""
        sums: dict[int, _Loss] = {}
        updated = set(counter.indices)
        for loss in self._waiting:
            if updated.isdisjoint(loss.indices):
                continue
            value = loss.value
            if loss.number in sums:
                value = sums[loss.number].value + value
            sums[loss.number] = loss._replace(value=value)
        losses = {}
        for place, number in enumerate(sorted(sums)):
            loss = sums[number]
            title = f"{LOSS}[{place}]" if place else LOSS
            name = self.name_of(counter, title, loss.indices)
            losses[name] = loss.value
        return losses

    def name_of(self, counter: StepCounter, base: str, indices: Sequence[int]) -> str:
        """Return a name that no other optimizer has, with the module of some parameters if there are several optimizers."""
        if (counter, base) not in self._known:
            counters = self._counters
            owners = [owner for owner in counters.all if owner is not counters.common]
            name = base
            if len(owners) > 1:
                # By letters: `blocks.1` and `blocks.12` share what is before the last dot.
                shared = commonprefix([self._names[index] for index in indices])  # noqa: RUF071
                name = f"{shared.rpartition('.')[0]}.{base}".removeprefix(".")
            # A script may build its optimizer anew.
            for key in [*self._known]:
                if key[0] not in owners:
                    del self._known[key]
            if name in self._known.values():
                name = f"{name}[{counters.all.index(counter)}]"
            self._known[counter, base] = name
        return self._known[counter, base]

    def _record(
        self, stat: str, name: str, step: int, value: Tensor, *, is_copy: bool = False
    ) -> None:
        if not self._rule:
            return
        key = Key(self._rule, stat, "step", (name,))
        self._recorder.add(key, step, (0,), value, replace=True, is_copy=is_copy)

    def _record_rates(self, counter: StepCounter, optimizer: Optimizer) -> None:
        label = self.name_of(counter, type(optimizer).__name__, counter.indices)
        for number, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            name = f"{label}/{number}"
            if rate is None or (name not in self._rates and len(self._rates) >= _MOST_GROUPS):
                continue
            last, step = self._rates.get(name, (None, 0))
            # A tensor may have changed, and a comparison would wait for its device.
            if isinstance(rate, Tensor):
                self._record(RATE, name, counter.step, rate)
            elif rate != last or counter.step >= step + _REPEATED:
                self._rates[name] = (rate, counter.step)
                self._record(RATE, name, counter.step, torch.tensor([float(rate)], device="cpu"))

    def before(self, step: int) -> str:
        """Return the learning rates and losses up to an update, in words. Waits for the device."""
        self._recorder.flush()
        rates = set()
        losses: list[str] = []
        for series in self._recorder.records:
            if series.key.stat == RATE:
                rates.add(_rate_before(series))
            elif series.key.stat == LOSS:
                losses += _loss_before(series, step)
        return "; ".join([*sorted(rates)[:_MOST_TOLD], *losses[:_MOST_TOLD]])


def _rate_before(series: WholeSeries) -> str:
    values = series.values_of(series.key.names[0])
    since, rate = values[-1]
    text = f"learning rate {rate:.4g}"
    for step, value in reversed(values):
        if f"learning rate {value:.4g}" != text:
            # A schedule moves in each update, by little.
            return f"{text} since step {since}, {value:.4g} before"
        since = step
    return f"{text} since step {since}"


def _loss_before(series: WholeSeries, step: int) -> Iterator[str]:
    name = series.key.names[0]
    values = [value for number, value in series.values_of(name) if number < step][-_BEFORE:]
    if values:
        steps = count(len(values), "step")
        yield f"{name} {values[0]:.3g} to {values[-1]:.3g} in the {steps} before"
