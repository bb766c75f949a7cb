"""The loss and the learning rates of each update, recorded wherever a rule records norms of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from posixpath import commonpath
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.actions import ObserverRule, Rule
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.recorder import Recorder
from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.memory import LOSS, RATE
from gradsurgeon.runtime.loss_roots import LossRoots
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.scaler_watch import Scaling, unscaled
from gradsurgeon.runtime.step_counters import StepCounter, StepCounters
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.backward_graph import BackwardGraph

# Losses of one forward pass that have a name of their own.
_MOST_LOSSES = 8
# Optimizers whose learning rates are recorded: a script may make one for each parameter.
_MOST_OPTIMIZERS = 16
# An unchanged learning rate is recorded again after so many updates: memory is bounded, and drops the oldest rows.
_REPEATED = 100
# Both are recorded when the update begins.
_POINT = "step"
# Updates before a failed one whose losses its diagnosis tells.
_BEFORE = 20


@dataclass(slots=True, eq=False)
class _Waiting:
    """The losses of backward passes whose update has not come, summed: those of several micro-batches are one.

    Attributes:
        indices: the parameters that the first of the passes reached.
        sums: float32, in true units; several if the script had computed several losses before the first pass.
        last: which of them the last pass began from.
        begun: the number of the next node when the last pass began.
    """

    indices: Sequence[int]
    sums: list[Tensor] = field(default_factory=list)
    last: int = -1
    begun: int = -1

    def add(self, losses: Sequence[Tensor], roots: LossRoots) -> None:
        # A loss that was computed before the last pass is another one. Any other is that of another micro-batch.
        if roots.made >= self.begun:
            self.last = -1
        self.begun = roots.begun
        for loss in losses:
            self.last = min(self.last + 1, _MOST_LOSSES - 1)
            if self.last < len(self.sums):
                self.sums[self.last] = self.sums[self.last] + loss
            else:
                self.sums.append(loss)


class TrainingCurves:
    """Records losses and learning rates under the rule that records norms in every step, or else under the first."""

    def __init__(
        self,
        rules: Sequence[Rule],
        recorder: Recorder,
        counters: StepCounters,
        scaling: Scaling,
        names: Sequence[str],
    ) -> None:
        self._rule = _logging(rules)
        self._recorder = recorder
        self._counters = counters
        self._scaling = scaling
        self._names = names
        self._waiting: list[_Waiting] = []
        # The loss of the running pass, and whether an optimizer inside the pass has taken it.
        self._running: Tensor | None = None
        self._is_taken = False
        # The curve of each loss of a counter, and the name of its optimizer.
        self._losses: dict[tuple[StepCounter, int], Key] = {}
        self._optimizers: dict[StepCounter, str] = {}
        self._rates: dict[tuple[str, int], Key] = {}
        # By counter, the learning rates that were recorded last, and in which update.
        self._last_rates: dict[StepCounter, tuple[list[Any], int]] = {}

    def began(self, graph: BackwardGraph) -> None:
        self._running = graph.loss
        self._is_taken = False

    def passed(self, done: BackwardPass) -> None:
        """Take the losses of a pass that has ended. The first rule to tell of the pass is enough."""
        roots = done.losses
        self._running = None
        counters = self._counters.among(done.indices)
        if roots is None or not roots.values or not counters or self._is_taken:
            return
        losses = [_copy(value, done.scale) for value in roots.take()]
        if self._waiting:
            self._forget_cleared(done, counters)
        self._waiting_of(done, counters).add(losses, roots)

    def _waiting_of(self, done: BackwardPass, counters: list[StepCounter]) -> _Waiting:
        for waiting in self._waiting:
            if self._counters.among(waiting.indices) == counters:
                return waiting
        waiting = _Waiting(done.indices)
        self._waiting.append(waiting)
        return waiting

    def _forget_cleared(self, done: BackwardPass, counters: Sequence[StepCounter]) -> None:
        """Forget the losses of passes whose gradients were cleared before this pass, so they feed no update."""
        if done.graph is None:
            return  # FSDP keeps the gradients of earlier passes elsewhere
        cleared = set()
        for counter in counters:
            if set(counter.indices).isdisjoint(done.had):
                cleared.add(counter)
        for waiting in list(self._waiting):
            if cleared.issuperset(self._counters.among(waiting.indices)):
                self._waiting.remove(waiting)

    def updating(self, counter: StepCounter, optimizer: Optimizer | None) -> None:
        """Record the losses that feed an update, and the learning rates of its optimizer, once per update."""
        is_new = counter.recorded != counter.step
        if not is_new and not self._waiting:
            return
        counter.recorded = counter.step
        if _torch.graph_task() == -1:
            self._record_waiting(counter, is_new=is_new)
        elif self._running is not None:
            # The optimizer steps inside the pass, as may others.
            loss = _copy(self._running, self._scaling.scale)
            self._running = None
            self._is_taken = True
            self._record_losses([loss], counter, LOSS)
        is_known = counter in self._optimizers or len(self._optimizers) < _MOST_OPTIMIZERS
        if is_new and is_known and optimizer is not None:
            self._record_rates(counter, optimizer)

    def _record_waiting(self, counter: StepCounter, *, is_new: bool) -> None:
        for waiting in list(self._waiting):
            reached = self._counters.among(waiting.indices)
            if counter not in reached:
                continue
            # Other optimizers of these parameters step later, and have no other loss.
            self._waiting.remove(waiting)
            # An optimizer may evaluate its closure several times: its `step` returns the first loss.
            if not is_new:
                continue
            # A pass that feeds several optimizers is no loss of a module, unless another optimizer has a loss.
            base = LOSS
            if len(reached) == 1 or any(other is not counter for other, _ in self._losses):
                base = self._with_module(LOSS, counter)
            self._record_losses(waiting.sums, counter, base)

    def _record_losses(self, losses: Sequence[Tensor], counter: StepCounter, base: str) -> None:
        for number, value in enumerate(losses):
            if (counter, number) not in self._losses:
                self._name_loss(counter, number, base)
            key = self._losses[counter, number]
            self._recorder.add_beside(key, counter.step, (0,), value)

    def _name_loss(self, counter: StepCounter, number: int, base: str) -> None:
        owners = self._owners()
        # A script may build its optimizer anew.
        known = {place: key for place, key in self._losses.items() if place[0] in owners}
        name = _not_among(base, [key.names[0] for key in known.values()])
        known[counter, number] = Key(self._rule, LOSS, _POINT, (name,))
        self._losses = known

    def _owners(self) -> list[StepCounter]:
        """Return the counters of optimizers, or the common one without any."""
        common = self._counters.common
        owners = [counter for counter in self._counters.all if counter is not common]
        return owners or [common]

    def _with_module(self, name: str, counter: StepCounter) -> str:
        """Return a name after the module of an optimizer, if there are several optimizers and each has its own."""
        if len(self._owners()) == 1:
            return name
        module = self._module_of(counter.indices)
        if module in ("", self._module_of(range(len(self._names)))):
            return name
        return f"{module}.{name}"

    def _module_of(self, indices: Sequence[int]) -> str:
        """Return the innermost module that holds some parameters."""
        paths = []
        for index in indices:
            module = self._names[index].rpartition(".")[0]
            paths.append(module.replace(".", "/"))
        return commonpath(paths).replace("/", ".")

    def _record_rates(self, counter: StepCounter, optimizer: Optimizer) -> None:
        """Record learning rates that have changed, or that were not recorded for a while."""
        now = [group.get("lr") for group in optimizer.param_groups]
        known, step = self._last_rates.get(counter, ([], 0))
        if now == known and counter.step < step + _REPEATED:
            return
        # A tensor may have changed, and a comparison would wait for its device.
        has_tensors = any(isinstance(rate, Tensor) for rate in now)
        self._last_rates[counter] = ([] if has_tensors else now, counter.step)
        columns = []
        rates = []
        for number, rate in enumerate(now):
            if isinstance(rate, (Tensor, Real)):
                columns.append(number)
                rates.append(rate)
        if not rates:
            return
        if counter not in self._optimizers:
            self._name_optimizer(counter, optimizer)
        name = self._optimizers[counter]
        groups = len(now)
        if (name, groups) not in self._rates:
            names = tuple([f"{name}/{number}" for number in range(groups)])
            self._rates[name, groups] = Key(self._rule, RATE, _POINT, names)
        key = self._rates[name, groups]
        values = _numbers_of(rates)
        self._recorder.add_beside(key, counter.step, columns, values)

    def _name_optimizer(self, counter: StepCounter, optimizer: Optimizer) -> None:
        owners = self._owners()
        known = {owner: name for owner, name in self._optimizers.items() if owner in owners}
        name = self._with_module(type(optimizer).__name__, counter)
        known[counter] = _not_among(name, list(known.values()))
        self._optimizers = known

    def before(self, step: int) -> str:
        """Return the learning rates and losses up to an update, in words. Waits for the device."""
        self._recorder.flush()
        words: list[str] = []
        for key in self._rates.values():
            words += _rates_before(self._recorder.records, key, step)
        for key in self._losses.values():
            words += _loss_before(self._recorder.records, key, step)
        return "; ".join(words)


def _logging(rules: Sequence[Rule]) -> str:
    """Return the rule that records norms in every step, or else the first that records some; empty without any."""
    loggers = [rule for rule in rules if isinstance(rule, ObserverRule)]
    for rule in loggers:
        if rule.steps.always:
            return rule.id
    return loggers[0].id if loggers else ""


def _copy(loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return a detached loss in true units, float32. The script may write to its own."""
    return unscaled(loss.to(torch.float32, copy=True), scale)


def _not_among(name: str, taken: Sequence[str]) -> str:
    number = 0
    free = name
    while free in taken:
        number += 1
        free = f"{name}[{number}]"
    return free


def _numbers_of(rates: Sequence[Any]) -> Tensor:
    """Return learning rates as float32, on a device if one of them is there: reading it would wait."""
    device = torch.device("cpu")
    for rate in rates:
        if isinstance(rate, Tensor) and not _torch.is_host(rate):
            device = rate.device
    if device.type == "cpu":
        return torch.tensor([float(rate) for rate in rates], dtype=torch.float32, device=device)
    parts = []
    for rate in rates:
        if isinstance(rate, Tensor) and rate.device == device:
            parts.append(rate.detach().reshape(()).to(torch.float32))
        else:
            parts.append(torch.full((), float(rate), dtype=torch.float32, device=device))
    return torch.stack(parts)


def _rates_before(records: Records, key: Key, step: int) -> Iterator[str]:
    """Yield the last learning rate of each group, and since when it holds, once for groups alike."""
    told = set()
    for series in records.series(key.names[0], RATE):
        for name in key.names:
            values = [pair for pair in series.values_of(name) if pair[0] <= step]
            if not values:
                continue
            since, rate = values[-1]
            for earlier, value in reversed(values):
                if value != rate:
                    break
                since = earlier
            told.add((rate, since))
    for rate, since in sorted(told):
        yield f"learning rate {rate:.4g} since step {since}"


def _loss_before(records: Records, key: Key, step: int) -> Iterator[str]:
    name = key.names[0]
    for series in records.series(name, LOSS):
        values = [pair for pair in series.values_of(name) if pair[0] <= step]
        text = ""
        earlier = [value for number, value in values if number < step][-_BEFORE:]
        if earlier:
            text = (
                f"{earlier[0]:.3g} to {earlier[-1]:.3g} in the {count(len(earlier), 'step')} before"
            )
        if values and values[-1][0] == step:
            now = f"{values[-1][1]:.3g}"
            text = f"{text}, then {now}" if text else now
        if text:
            yield f"{name} {text}"
