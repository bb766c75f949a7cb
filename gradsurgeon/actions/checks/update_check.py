"""Finds parameters that do not move, and updates that make a weight non-finite."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Finding, Findings, Update
from gradsurgeon.actions.checks.dead_params import DeadParams
from gradsurgeon.actions.checks.optimizer_checks import Checks, OptimizerCheck
from gradsurgeon.actions.checks.outside_leaves import OutsideLeaves
from gradsurgeon.actions.checks.zero_gradients import ZeroGradients
from gradsurgeon.tensors import _numbers
from gradsurgeon.tensors.sampling import by_device, differing, largest, sample

# A look compares weights with those of ten updates earlier; after fifty updates, of a hundred updates earlier.
WINDOW = 10
SETTLED = 50
LATER = 100
# The first updates are looked at one by one: they show a NaN before the next forward spreads it.
_FIRST = 3
# A learning rate may be 0 for a while, and a weight in half precision may have a float32 copy elsewhere:
# both are given so many updates.
PATIENCE = 100
# A gradient that mathematics makes 0, as before a batch norm, is this far below the others.
_NOISE = 1e-4

_STILL = "{{names}} did not move in {updates} updates although gradients come: "
_CAUSES = {
    "unowned": "no optimizer that has stepped owns {{it}}. Make the optimizer after the last change of the model, give "
    "{{it}} to the optimizer by `add_param_group`, or set requires_grad to False where no training is meant",
    "frozen": "rule {rule} freezes {{it}}. Exclude {{it}} from one of the two rules",
    "skipped": "all these updates were skipped. Look at why: the events of traps and of the loss scale say it",
    "lr": "the learning rate is 0. Set one in the group of the optimizer, or look at the schedule",
    "rounded": "{dtype} rounds each update away: at the learning rate {lr:.1e} it is too small. {remedy}",
    "unwritten": "the optimizer owns {{it}} and the learning rate is {lr:.1e}, but its step leaves {{it}} unchanged. Look "
    "for a compiled or wrapped `step` that has lost {{it}}",
}
_RAISE_RATE = "Raise the learning rate"
_KEEP_FLOAT32 = "Keep the weights in float32 and compute in {dtype} under `torch.autocast`, or raise the learning rate"
_BROKEN = (
    "the update made {names} non-finite although its gradients were finite. Look at the learning rate, and at "
    "eps of the optimizer: 1e-8 is 0 in float16"
)
_BROKEN_FIRST = (
    "the first update left {names} non-finite although its gradients were finite. Look at the learning rate, at eps of "
    "the optimizer: 1e-8 is 0 in float16, and at the initialization or checkpoint, in case NaN was there before"
)
_BROKEN_BETWEEN = (
    "{{names}} became non-finite within the last {updates} updates, and the gradients of the last one are finite. Look at "
    "the gradients of the updates before it (`nan-trap`), at the learning rate, and at eps of the optimizer: 1e-8 is 0 in "
    "float16"
)


class UpdateCheck(Checks):
    """Looks at weights right after an update: whether they moved, and whether they are finite."""

    def __init__(self) -> None:
        self._outside = OutsideLeaves()
        super().__init__([self._outside], Unmoved, DeadParams, ZeroGradients)

    def rests(self, method: str) -> bool:
        if self._outside.waits_for == method:
            return False
        for owner in self.owners.values():
            for check in owner.checks:
                if check.waits_for == method:
                    return False
        return True


class Unmoved(OptimizerCheck):
    """Looks for weights that do not move although gradients come, and for those that become non-finite."""

    def __init__(self) -> None:
        # The updates that took place.
        self._performed = 0
        # The last samples of weights, and the number of the update after which they were taken.
        self._samples: dict[int, Tensor] = {}
        self._sampled = 1
        # Parameters whose sample did not move, and the number of updates since it last did.
        self._suspects: dict[int, int] = {}
        # Each suspect is tested where its gradient is largest: places, values before this update, and updates without a move.
        self._tests: dict[int, tuple[Tensor, Tensor, int]] = {}
        # Parameters whose sample was not finite: no later update has made it so.
        self._nonfinite: set[int] = set()
        # The largest usual size of a gradient so far.
        self._usual = 0.0

    @property
    def waits_for(self) -> str:
        return "before_update" if self._suspects else ""

    def before_update(self, update: Update) -> Findings:
        for index in self._suspects.keys() & update.params.keys() & update.grads.keys():
            places = largest(update.grads[index])
            values = torch.take(update.params[index], places)
            self._tests[index] = (places, values, self._suspects.pop(index))
        return ()

    def after_update(self, update: Update) -> Findings:
        number = self.owner.updates + 1
        update.when_known(self._count)
        if self._tests:
            yield from self._causes(update)
            self._tests = {}
        if number == 1:
            self._usual = _usual_gradient(update)
        ends_window = _ends_window(number)
        if ends_window or number <= _FIRST:
            self._sample(update, number, ends_window=ends_window)

    def _count(self, took_place: bool) -> None:  # noqa: FBT001 # a callback
        self._performed += took_place

    def _sample(self, update: Update, number: int, *, ends_window: bool) -> None:
        new = {}
        for index in update.indices:
            if index in update.grads and update.params[index].numel():
                new[index] = sample(update.params[index])
        span = 0
        broken = _BROKEN
        if ends_window:
            span = number - self._sampled
            broken = _BROKEN_BETWEEN.format(updates=number - max(self._sampled, _FIRST))
            self._sampled = number
        # Nothing shows what a tensor was before its first sample.
        texts = {index: broken if index in self._samples else _BROKEN_FIRST for index in new}
        for indices in by_device(new, new):
            before = [self._samples.get(index, new[index]) for index in indices]
            after = [new[index] for index in indices]
            finite = torch.stack([values.isfinite().all() for values in after])
            seen = torch.stack([differing(before, after), finite.float()])
            update.later(seen, partial(self._judge, update, indices, span, texts))
        if ends_window:
            self._samples = self._samples | new
        else:
            # Within a window the first samples count.
            self._samples = new | self._samples

    def _judge(
        self,
        update: Update,
        indices: Sequence[int],
        span: int,
        texts: Mapping[int, str],
        seen: Tensor,
    ) -> Findings:
        """Judge the samples of some tensors; they are compared with those of ``span`` updates before, if any."""
        nonfinite: dict[str, list[int]] = {}
        for index, share, is_finite in zip(indices, *seen.tolist(), strict=True):
            if not is_finite and index not in self._nonfinite:
                self._nonfinite.add(index)
                if index in update.grads and update.has_finite_grad(index):
                    nonfinite.setdefault(texts[index], []).append(index)
            if share:
                self.owner.moved.add(index)
                self._suspects.pop(index, None)
            elif span:
                self._suspects[index] = self._suspects.get(index, 0) + span
        for text, its_indices in nonfinite.items():
            yield Finding("non-finite", text, tuple(its_indices))

    def _causes(self, update: Update) -> Findings:
        """Yield one finding for each cause for which parameters that should have moved did not."""
        waited = {}
        for index, (places, before, updates) in sorted(self._tests.items()):
            now = torch.take(update.params[index], places)
            if not bool(differing([before], [now])):
                waited[index] = updates
        if not waited:
            return
        # Compared with earlier ones also: near a minimum all gradients are rounding noise.
        self._usual = max(self._usual, _usual_gradient(update))
        by_cause = defaultdict(list)
        for index, updates in waited.items():
            grad = update.grads.get(index)
            if grad is None or not _rms(grad) > _NOISE * self._usual:
                continue
            cause = self._cause(update, index)
            if cause and updates < _patience(cause, update, index):
                self._suspects[index] = updates
            elif cause:
                by_cause[cause].append(index)
        for cause, indices in by_cause.items():
            first = indices[0]
            text = _STILL.format(updates=waited[first]) + _consequence(cause, update, first)
            yield Finding(cause, text, tuple(indices))

    def _cause(self, update: Update, index: int) -> str:
        """Return why a parameter did not move, a key of `_CAUSES`; an empty string if it need not move."""
        if index in update.frozen:
            return "frozen"
        group = update.groups.get(index)
        if group is None:
            # A part in evaluation mode, such as a network inside the loss, is not meant to train.
            return "" if update.model.is_resting(index) else "unowned"
        return self._cause_of_owned(update, index, group) if self._performed else "skipped"

    def _cause_of_owned(self, update: Update, index: int, group: Mapping[str, Any]) -> str:
        # An optimizer that stops at a tolerance, or a proximal step that holds a weight at 0.
        if "tolerance_grad" in group or not bool(update.params[index].detach().any()):
            return ""
        return self._cause_with_group(update, index, _learning_rate(group))

    def _cause_with_group(self, update: Update, index: int, lr: float) -> str:
        if lr and _should_move(update, index, lr):
            return "unwritten"
        cause = "rounded" if lr else "lr"
        # A schedule may end, and a training come to its minimum.
        return "" if index in self.owner.moved else cause


def _ends_window(number: int) -> bool:
    """Tell whether the samples after this update are compared with those at the end of the last window."""
    window = WINDOW
    if number > SETTLED + 1:
        window = LATER
    return number > 1 and number % window == 1


def _patience(cause: str, update: Update, index: int) -> int:
    """Return how many updates a parameter may rest for a cause that may pass."""
    param = update.params[index]
    is_kept_elsewhere = cause == "unowned"
    for value in update.state_of(index).values():
        if isinstance(value, Tensor) and value.numel() == param.numel():
            is_kept_elsewhere |= value.dtype == torch.float32
    if cause == "lr" or (param.dtype in _numbers.HALF and is_kept_elsewhere):
        return PATIENCE
    return WINDOW


def _consequence(cause: str, update: Update, index: int) -> str:
    param = update.params[index]
    dtype = str(param.dtype).removeprefix("torch.")
    remedy = _RAISE_RATE
    if param.dtype in _numbers.HALF:
        remedy = _KEEP_FLOAT32.format(dtype=dtype)
    rule = update.frozen.get(index)
    lr = _learning_rate(update.groups.get(index, {}))
    return _CAUSES[cause].format(rule=rule, lr=lr, dtype=dtype, remedy=remedy)


def _learning_rate(group: Mapping[str, Any]) -> float:
    return float(group.get("lr", 1.0))


def _should_move(update: Update, index: int, lr: float) -> bool:
    """Tell whether an update with the gradient is larger than what the parameter's dtype rounds away."""
    param = update.params[index].detach()
    state = update.state_of(index)
    grad = update.grads[index].detach()
    if grad.is_sparse:
        grad = grad.to_dense()
    size = grad.abs().float()
    # Optimizers with second moments divide a gradient by its usual size. A noisy one moves by a tenth of that.
    if "sum" in state or any("sq" in key for key in state):
        size = size.gt(0).float() / 10
    gap = param.abs().float() * torch.finfo(param.dtype).eps
    return bool((lr * size > 2 * gap).any())


def _rms(grad: Tensor) -> float:
    """Return the usual size of an element of a gradient, NaN if it has none."""
    return float(_numbers.values(grad).abs().float().square().mean().sqrt())


def _usual_gradient(update: Update) -> float:
    sizes = [_rms(update.grads[index]) for index in update.indices if index in update.grads]
    return max(0.0, float(torch.tensor(sizes).nanmedian()))
