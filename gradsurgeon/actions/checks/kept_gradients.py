"""Finds gradients that are kept into the next update, that are gone before it, and that two optimizers use."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.actions.checks.base import Finding, Findings, Moment, Pass, Update, owned_ids
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck, Streak, TrackedOptimizer
from gradsurgeon.common import _live
from gradsurgeon.tensors import _numbers
from gradsurgeon.tensors.sampling import dense_grads, largest

# A script may do something once on purpose. It is reported from the third update in a row on.
IN_A_ROW = 3
_MOST_FLAGS = 256

_STALE = (
    "the update of step {step} used gradients that were there before the update of step {before}, that of {{names}} "
    "for one: they were not cleared, so each update adds up all passes so far. Call `optimizer.zero_grad()` once "
    "per update, before `backward()`"
)
_GONE = (
    "backward passes gave gradients, {{names}} for one, but at the update of step {step} all of them were gone, "
    "for the third time in a row. Call `optimizer.zero_grad()` after `optimizer.step()` or before `backward()`, not "
    "between `backward()` and `step()`"
)
_SHARED = (
    "{{names}} belong to {number} optimizers ({kinds}), and the update of step {step} had no gradient, for the third time "
    "in a row: `zero_grad()` of one clears what another needs. Give each optimizer the parameters of its own model"
)
_TWICE = (
    "{{names}} belong to {number} optimizers ({kinds}), and the update of step {step} used gradients that another optimizer had used "
    "already, for the third time in a row: each backward pass moves {{it}} twice. Give each parameter to one optimizer"
)


class Stale(OptimizerCheck):
    """Looks for gradients that were there before the last update, and reach this one."""

    def __init__(self) -> None:
        # Maps sampled parameters that kept their gradients into a new pass to the addresses of these.
        self._kept: dict[int, int] = {}
        self._last_step = -1
        self._streak = Streak(IN_A_ROW)

    def before_pass(self, starting: Pass) -> Findings:
        for index in _used_before(starting, self.owner):
            self._kept[index] = starting.grads[index].data_ptr()
        self.owner.used = {}
        for index in tuple(self._kept):
            if not starting.is_any([index]):
                del self._kept[index]
        return ()

    def before_update(self, update: Update) -> Findings:
        stale = []
        for index in sorted(self._kept.keys() & update.grads.keys()):
            # Delayed gradients are other tensors. A frozen parameter keeps its gradient.
            is_same = update.grads[index].data_ptr() == self._kept[index]
            if is_same and update.originals[index].requires_grad:
                stale.append(index)
        if self._streak.reaches(stale):
            # Any of the sampled parameters stands for all that the script has not cleared.
            text = _STALE.format(step=update.step, before=self._last_step)
            yield Finding("stale", text, (stale[0],))

    def after_update(self, update: Update) -> Findings:
        self._kept = {}
        self._last_step = update.step
        used = {}
        for index, grad in dense_grads(update.grads, self.owner.sampled).items():
            places = largest(grad)
            used[index] = (places, torch.take(grad, places))
        update.when_known(partial(self._use, used))
        return ()

    def _use(self, used: dict[int, tuple[Tensor, Tensor]], took_place: bool) -> None:  # noqa: FBT001 # a callback
        if took_place:
            self.owner.used |= used


class Twice(OptimizerCheck):
    """Looks for gradients that other optimizers have used already. A pass in between takes the old values away."""

    def __init__(self) -> None:
        self._streak = Streak(IN_A_ROW)

    def before_update(self, update: Update) -> Findings:
        used = set[int]()
        for other in self.owner.others:
            used |= _used_before(update, other)
        if self._streak.reaches(used & self.owner.shared):
            concerned = tuple(sorted(self.owner.shared & update.grads.keys()))
            yield Finding("twice", _with_holders(_TWICE, update, concerned[0]), concerned)


class Gone(OptimizerCheck):
    """Looks for gradients that passes gave, and that are gone before the update."""

    def __init__(self) -> None:
        # A 0-dim tensor for each pass since the last update: whether it gave the sampled parameters other gradients than 0.
        self._got: list[Tensor] = []
        self._streak = Streak(IN_A_ROW)

    def after_pass(self, done: Pass) -> Findings:
        if len(self._got) < _MOST_FLAGS:
            self._got += _flags(done.grads, self.owner.sampled)
        return ()

    def before_update(self, update: Update) -> Findings:
        number = len(self._got)
        if number:
            flags = [*self._got, *_flags(update.grads, self.owner.sampled)]
            device = flags[0].device
            values = torch.stack([flag.to(device) for flag in flags])
            update.later(values, partial(self._judge, update, number))
        self._got = []
        return ()

    def _judge(self, update: Update, number: int, seen: Tensor) -> Findings:
        """Judge what so many flags say of passes, and the others of the update."""
        had_gradients = bool(seen[:number].any())
        are_gone = had_gradients and not bool(seen[number:].any())
        # The script may clear the sampled parameters on purpose: then other parameters have gradients.
        are_all_gone = are_gone and not update.is_any(update.indices)
        if self._streak.reaches(are_all_gone):
            first = self.owner.sampled[0]
            if len(_holders(update, first)) > 1:
                yield Finding("shared", _with_holders(_SHARED, update, first), (*update.groups,))
            else:
                yield Finding("gone", _GONE.format(step=update.step), (first,))


def _flags(grads: Mapping[int, Tensor], indices: Sequence[int]) -> list[Tensor]:
    """Return whether some gradients have an element other than 0, a 0-dim tensor each."""
    return [_numbers.values(grads[index]).any() for index in indices if index in grads]


def _used_before(moment: Moment, owner: TrackedOptimizer) -> set[int]:
    """Return the parameters whose gradients an optimizer has used, and are there still."""
    used = set()
    for index, (places, values) in owner.used.items():
        grad = moment.grads.get(index)
        if (
            grad is not None
            and bool(values.any())
            and torch.equal(torch.take(grad, places), values)
        ):
            used.add(index)
    return used


def _holders(update: Update, index: int) -> list[str]:
    """Return the kinds of all optimizers that hold a parameter."""
    param = id(update.originals[index])
    optimizers = _live.instances(Optimizer)
    return sorted(type(each).__name__ for each in optimizers if param in owned_ids(each))


def _with_holders(text: str, update: Update, index: int) -> str:
    kinds = _holders(update, index)
    return text.format(number=len(kinds), kinds=" and ".join(kinds), step=update.step)
