"""Finds what differs from most trainings and may be meant: passes in evaluation mode, one input, a scheduler that runs ahead."""

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from gradsurgeon.actions.checks.base import Check, Finding, Findings, Pass, Update
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck
from gradsurgeon.actions.checks.same_data import numbers_of
from gradsurgeon.common import _live
from gradsurgeon.tensors import _dist

# So many passes tell what every pass does. Of later inputs one in so many is looked at.
_FEW = 20
# The updates of an optimizer between which the steps of its schedulers are counted.
_FIRST = 4
_SECOND = 19

_EVALUATED = (
    "each of {passes} passes ran in evaluation mode, so dropout is off, and batch norms use their running statistics: "
    "{{names}}. Call `model.train()` before the training, unless this is meant"
)
_INPUT = (
    "the model got the same input in each of {passes} passes looked at. A full batch does so, and a test of overfitting; otherwise look "
    "whether the loop takes the first batch of its loader again and again"
)
_AHEAD = (
    "{kind} went {steps} steps in {updates} updates, so the learning rate changes too fast. Call its `step()` once after each "
    "`optimizer.step()`, not once per micro-batch, or count its steps in the schedule"
)
_RATE = (
    "the learning rate of {kind} is {rate:.3g}, so each update may move each weight by that much. Try 0.001, unless the "
    "weights are as large"
)


class LoopFacts(Check):
    """Looks at the passes of a training, and drops each question as soon as the answer is the usual one."""

    def __init__(self) -> None:
        self._passes = 0
        self._updates = 0
        # The modules that evaluation mode changes, if all passes so far ran in it.
        self._evaluated: tuple[str, ...] = ()
        # Norm and sum of the inputs, if all passes so far had the same ones.
        self._input: Tensor | None = None
        self._looks = 0

    def after_pass(self, done: Pass) -> Findings:
        self._passes += 1
        is_first = self._passes == 1
        if is_first:
            self._evaluated = tuple(done.model.modal_names())
        if self._evaluated and not done.model.is_evaluated():
            self._evaluated = ()
        is_looked_at = self._passes <= _FEW or self._passes % _FEW == 0
        if is_first or (self._input is not None and is_looked_at):
            self._looks += 1
            before = self._input
            self._input = numbers_of(done)
            if before is not None and self._input is not None:
                done.later((before[:2] != self._input[:2]).any(), self._judge_input)
        return ()

    def _judge_input(self, differs: Tensor) -> tuple[()]:
        if differs:
            self._input = None
        return ()

    def after_update(self, update: Update) -> Findings:  # noqa: ARG002 # of any optimizer
        self._updates += 1
        return ()

    def at_end(self) -> Findings:
        if self._passes < _FEW or not self._updates:
            return
        if self._evaluated:
            text = _EVALUATED.format(passes=f"{self._passes:,}")
            yield Finding("evaluated", text, names=self._evaluated, is_fact=True)
        # The closures of one update see one batch.
        if self._input is not None and self._updates > 1:
            yield Finding("input", _INPUT.format(passes=f"{self._looks:,}"), is_fact=True)


class RateFacts(OptimizerCheck):
    """Looks at the learning rates of one optimizer, and at how far its schedulers go between two updates."""

    def __init__(self) -> None:
        # Maps each scheduler to its lead over the updates.
        self._leads: dict[LRScheduler, int] = {}

    def after_update(self, update: Update) -> Findings:
        if self.owner.updates == _FIRST:
            yield from _large_rates(update)
            # Torch wraps the `step` of an optimizer that has a scheduler.
            if hasattr(getattr(update.optimizer, "step", None), "_wrapped_by_lr_sched"):
                for scheduler in _live.instances(LRScheduler):
                    if getattr(scheduler, "optimizer", None) is update.optimizer:
                        self._leads[scheduler] = scheduler.last_epoch - update.step
        elif self.owner.updates == _SECOND:
            updates = _SECOND - _FIRST
            for scheduler, lead in self._leads.items():
                steps = updates + scheduler.last_epoch - update.step - lead
                # `accelerate` steps once for each rank.
                if steps > updates * _dist.world() + 1:
                    kind = f"the {type(scheduler).__name__} of an optimizer"
                    text = _AHEAD.format(kind=kind, steps=steps, updates=updates)
                    yield Finding("scheduler", text, is_fact=True)
            self._leads.clear()


def _large_rates(update: Update) -> Findings:
    """Find Adam and its kind with a rate above 1: an update divides each gradient by its own size."""
    for group in getattr(update.optimizer, "param_groups", ()):
        rate = group.get("lr")
        if "betas" in group and isinstance(rate, float) and rate > 1:
            text = _RATE.format(kind=type(update.optimizer).__name__, rate=rate)
            yield Finding("rate", text, is_fact=True)
            return
