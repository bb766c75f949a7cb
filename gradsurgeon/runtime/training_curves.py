"""The loss and the learning rates of each update, recorded wherever a rule records norms of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.actions import ObserverRule, Rule
from gradsurgeon.records.recorder import Recorder
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.memory import LOSS, RATE
from gradsurgeon.runtime.loss_roots import LossRoots
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.runtime.step_counters import StepCounter, StepCounters
from gradsurgeon.tensors import _dist, _torch

# Losses of one forward pass that have a name of their own, and optimizers whose learning rates are recorded.
_MOST_LOSSES = 8
_MOST_OPTIMIZERS = 16
# Both are recorded when the update begins.
_POINT = "step"


@dataclass(slots=True, eq=False)
class _Waiting:
    """The losses of backward passes whose update has not come, summed: those of several micro-batches are one.

    Attributes:
        counters: of the parameters that the passes reached.
        sums: float32, in true units; several if the script had computed several losses before the first pass.
        last: which of them the last pass began from.
        begun: the number of the next node when the last pass began.
    """

    counters: list[StepCounter]
    sums: list[Tensor]
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
        parameters: Parameters,
        names: Sequence[str],
    ) -> None:
        loggers = [rule for rule in rules if isinstance(rule, ObserverRule)]
        loggers.sort(key=lambda rule: not rule.steps.always)
        self._rule = loggers[0].id if loggers else ""
        self._recorder = recorder
        self._counters = counters
        self._parameters = parameters
        self._names = names
        self._waiting: list[_Waiting] = []
        # The counter that counted an update inside the running pass, with the number of that update.
        self._inside: tuple[StepCounter, int] | None = None
        # By the name of a curve, the counter, and which of its losses.
        self._curves: dict[tuple[str, StepCounter, int], Key] = {}
        self._groups: dict[tuple[str, int], Key] = {}

    def passed(self, done: BackwardPass) -> None:
        """Take the losses of a pass that has ended. The first rule to tell of the pass is enough."""
        roots = done.losses
        counters = self._counters.among(done.indices)
        if roots is None or not counters or not roots.values:
            return
        losses = []
        with torch.no_grad():
            for value in roots.take():
                copied = value.reshape(()).to(torch.float32, copy=True)
                losses.append(unscaled(copied, done.scale))
        if self._waiting:
            self._forget_cleared(done, counters)
        waiting = self._of(counters)
        waiting.add(losses, roots)
        if self._inside is not None:
            counter, step = self._inside
            self._inside = None
            self._waiting.remove(waiting)
            self._record_losses(waiting, counter, step)

    def _of(self, counters: list[StepCounter]) -> _Waiting:
        for waiting in self._waiting:
            if waiting.counters == counters:
                return waiting
        waiting = _Waiting(counters, [])
        self._waiting.append(waiting)
        return waiting

    def _forget_cleared(self, done: BackwardPass, counters: Sequence[StepCounter]) -> None:
        """Forget the losses of passes whose gradients were cleared before this pass, so they feed no update."""
        if any(map(_dist.is_divided, self._parameters.params(done.indices))):
            return  # FSDP keeps the gradients of earlier passes elsewhere
        for counter in counters:
            if not done.had or set(counter.indices).isdisjoint(done.had):
                self._take(counter)

    def _take(self, counter: StepCounter) -> list[_Waiting]:
        """Return and forget the losses that wait for an update."""
        taken = [waiting for waiting in self._waiting if counter in waiting.counters]
        for waiting in taken:
            self._waiting.remove(waiting)
        return taken

    def updating(self, counter: StepCounter, optimizer: Optimizer | None) -> None:
        """Record the losses that feed an update, and the learning rates of its optimizer, once per update."""
        if _torch.graph_task() != -1:
            # The optimizer steps inside the pass, which has not ended.
            if self._inside is None:
                self._inside = (counter, counter.step)
        else:
            taken = self._take(counter)
            # An optimizer may evaluate its closure several times: its `step` returns the first loss.
            if counter.recorded != counter.step:
                for waiting in taken:
                    self._record_losses(waiting, counter, counter.step)
        if counter.recorded != counter.step and optimizer is not None:
            self._record_rates(counter, optimizer)
        counter.recorded = counter.step

    def _record_losses(self, waiting: _Waiting, counter: StepCounter, step: int) -> None:
        for number, value in enumerate(waiting.sums):
            key = self._curve(counter, number)
            self._recorder.add(key, step, (0,), value, replace=True)

    def _curve(self, counter: StepCounter, number: int) -> Key:
        known = (LOSS, counter, number)
        if known not in self._curves:
            name = self._named(LOSS, [key.names[0] for key in self._curves.values()])
            self._curves[known] = Key(self._rule, LOSS, _POINT, (name,))
        return self._curves[known]

    def _named(self, base: str, taken: Sequence[str]) -> str:
        name = base
        number = 0
        while name in taken:
            number += 1
            name = f"{base}[{number}]"
        return name

    def _record_rates(self, counter: StepCounter, optimizer: Optimizer) -> None:
        rates = [group.get("lr") for group in optimizer.param_groups]
        numbers = [float(rate) for rate in rates if isinstance(rate, (int, float))]
        if not numbers:
            return
        known = (type(optimizer).__name__, len(numbers))
        key = self._groups.get(known)
        if key is None:
            names = tuple([f"{known[0]}/{number}" for number in range(len(numbers))])
            key = self._groups[known] = Key(self._rule, RATE, _POINT, names)
        values = torch.tensor(numbers, dtype=torch.float32, device="cpu")
        self._recorder.add(key, counter.step, range(len(numbers)), values, replace=True)
