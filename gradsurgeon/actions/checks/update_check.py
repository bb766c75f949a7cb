"""Finds parameters that do not move, and updates that make a weight non-finite."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Check, Finding, Pass, Update
from gradsurgeon.actions.checks.dead_params import DeadParams
from gradsurgeon.actions.checks.outside_leaves import OutsideLeaves
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
_BROKEN_BETWEEN = (
    "{{names}} became non-finite within the last {updates} updates, and the gradients of the last one are finite. Look at "
    "the gradients of the updates before it (`nan-trap`), at the learning rate, and at eps of the optimizer: 1e-8 is 0 in "
    "float16"
)


@dataclass(slots=True)
class _OptimizerUpdates:
    """The updates of one optimizer since the check began, and the last samples of its parameters."""

    updates: int = 0
    performed: int = 0
    samples: dict[int, Tensor] = field(default_factory=dict)
    # The update after which the samples were taken.
    sampled: int = 1
    # Parameters whose sample did not move, and the number of updates since it last did.
    suspects: dict[int, int] = field(default_factory=dict)
    # Parameters that have moved: a schedule, or a minimum, may bring them to rest.
    moved: set[int] = field(default_factory=set)
    # The largest usual size of a gradient so far.
    usual: float = 0.0
    dead: DeadParams = field(default_factory=DeadParams)
    # Where the gradient of a suspect is largest, its values there right before this update, and the updates without a move.
    tests: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)


class UpdateCheck(Check):
    """Looks at weights right after an update: whether they moved, and whether they are finite."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, _OptimizerUpdates] = {}
        self._outside = OutsideLeaves()
        # The parameters that backward passes have reached.
        self._reached: set[int] = set()

    def after_pass(self, done: Pass) -> Iterator[Finding]:
        self._reached.update(done.reached)
        yield from self._outside.after_pass(done)

    def close(self) -> None:
        for owner in self._owners.values():
            owner.dead.close()

    def before_update(self, update: Update) -> Iterable[Finding]:
        owner = self._owners.setdefault(update.owner, _OptimizerUpdates())
        for index in list(owner.suspects):
            param = update.params.get(index)
            grad = update.grads.get(index)
            if param is not None and grad is not None:
                places = largest(grad)
                values = torch.take(param, places)
                owner.tests[index] = (places, values, owner.suspects.pop(index))
        return ()

    def after_update(self, update: Update) -> Iterable[Finding]:
        owner = self._owners.setdefault(update.owner, _OptimizerUpdates())
        owner.updates += 1
        owner.performed += update.took_place
        if owner.tests:
            yield from _causes(owner, update)
            owner.tests = {}
        yield from owner.dead.after_update(update, owner.updates, owner.moved, self._reached)
        if owner.updates == 1:
            owner.usual = _usual_gradient(update)
        ends_window = _ends_window(owner.updates)
        if ends_window or owner.updates <= _FIRST:
            self._sample(owner, update, ends_window=ends_window)

    def _sample(self, owner: _OptimizerUpdates, update: Update, *, ends_window: bool) -> None:
        members = [index for index in update.indices if index in update.grads]
        new = {
            index: sample(update.params[index]) for index in members if update.params[index].numel()
        }
        span = 0
        broken = _BROKEN
        if ends_window:
            span = owner.updates - owner.sampled
            unseen = owner.updates - max(owner.sampled, _FIRST)
            broken = _BROKEN_BETWEEN.format(updates=unseen)
            owner.sampled = owner.updates
        for indices in by_device(new, new):
            before = [owner.samples.get(index, new[index]) for index in indices]
            after = [new[index] for index in indices]
            finite = torch.stack([values.isfinite().all() for values in after])
            judge = partial(self._judge, owner, update, indices, span, broken=broken)
            update.later(torch.stack([differing(before, after), finite.float()]), judge)
        if not ends_window:
            new |= owner.samples
        owner.samples |= new

    def _judge(
        self,
        owner: _OptimizerUpdates,
        update: Update,
        indices: Sequence[int],
        span: int,
        seen: Tensor,
        *,
        broken: str,
    ) -> Iterator[Finding]:
        """Judge the samples of some tensors; they are compared with those of ``span`` updates before, if any.

        ``broken`` is the sentence on non-finite weights.
        """
        nonfinite = []
        for index, share, is_finite in zip(indices, *seen.tolist(), strict=True):
            if not is_finite:
                nonfinite.append(index)
            if share:
                owner.moved.add(index)
                owner.suspects.pop(index, None)
            elif span:
                owner.suspects[index] = owner.suspects.get(index, 0) + span
        with_grad = [index for index in nonfinite if index in update.grads]
        finite_grads = [index for index in with_grad if update.has_finite_grad(index)]
        if finite_grads:
            yield Finding("non-finite", broken, tuple(finite_grads))


def _ends_window(number: int) -> bool:
    """Tell whether the samples after this update are compared with those at the end of the last window."""
    window = WINDOW
    if number > SETTLED + 1:
        window = LATER
    return number > 1 and number % window == 1


def _causes(owner: _OptimizerUpdates, update: Update) -> Iterator[Finding]:
    """Yield one finding for each cause for which parameters that should have moved did not."""
    waited = {}
    for index, (places, before, updates) in sorted(owner.tests.items()):
        now = torch.take(update.params[index], places)
        if not bool(differing([before], [now])):
            waited[index] = updates
    if not waited:
        return
    # Compared with earlier ones also: near a minimum all gradients are rounding noise.
    owner.usual = max(owner.usual, _usual_gradient(update))
    by_cause: dict[str, list[int]] = {}
    for index, updates in waited.items():
        grad = update.grads.get(index)
        if grad is None or not _rms(grad) > _NOISE * owner.usual:
            continue
        cause = _cause(update, index, owner)
        if cause and updates < _patience(cause, update, index):
            owner.suspects[index] = updates
        elif cause:
            by_cause.setdefault(cause, []).append(index)
    for cause, indices in by_cause.items():
        first = indices[0]
        text = _STILL.format(updates=waited[first]) + _consequence(cause, update, first)
        if cause == "lr":
            indices = _without_rate(owner, update)  # noqa: PLW2901 # those with small gradients too
        yield Finding(cause, text, tuple(indices))


def _without_rate(owner: _OptimizerUpdates, update: Update) -> list[int]:
    """Return the parameters that never moved and whose learning rate is 0, also those with too small a gradient."""
    still = [index for index in update.groups if index not in owner.moved]
    return [index for index in still if not _learning_rate(update.groups[index])]


def _cause(update: Update, index: int, owner: _OptimizerUpdates) -> str:
    """Return why a parameter did not move, a key of `_CAUSES`; an empty string if it need not move."""
    if index in update.frozen:
        return "frozen"
    if index in update.groups:
        return _cause_of_owned(update, index, owner)
    # A part in evaluation mode, such as a network inside the loss, is not meant to train.
    if update.model.is_resting(index):
        return ""
    return "unowned"


def _cause_of_owned(update: Update, index: int, owner: _OptimizerUpdates) -> str:
    group = update.groups[index]
    if not owner.performed:
        return "skipped"
    # An optimizer that stops at a tolerance, or a proximal step that holds a weight at 0.
    if "tolerance_grad" in group or not bool(update.params[index].detach().any()):
        return ""
    lr = _learning_rate(group)
    if lr and _should_move(update, index, lr):
        return "unwritten"
    # A schedule may end, and a training come to its minimum.
    if index in owner.moved:
        return ""
    if not lr:
        return "lr"
    return "rounded"


def _patience(cause: str, update: Update, index: int) -> int:
    """Return how many updates a parameter may rest for a cause that may pass."""
    is_half = update.params[index].dtype in _numbers.HALF
    if cause == "lr":
        return PATIENCE
    if is_half and (cause == "unowned" or _has_float32_copy(update, index)):
        return PATIENCE
    return WINDOW


def _has_float32_copy(update: Update, index: int) -> bool:
    numel = update.params[index].numel()
    for value in update.state_of(index).values():
        if isinstance(value, Tensor) and value.numel() == numel and value.dtype == torch.float32:
            return True
    return False


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
