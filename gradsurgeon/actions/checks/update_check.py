"""Finds parameters that do not move or should not have moved, and updates that spoil a weight."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon.actions.checks.base import Check, Finding, Pass, Update
from gradsurgeon.common import _live
from gradsurgeon.tensors import _dist, _numbers
from gradsurgeon.tensors.readable import readable
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
_FULL = "Raise the learning rate"
_REDUCED = "Keep the weights in float32 and compute in {dtype} under `torch.autocast`, or raise the learning rate"
_BROKEN = (
    "the update made {names} non-finite although its gradients were finite. Look at the learning rate, and at "
    "eps of the optimizer: 1e-8 is 0 in float16"
)
_OUTSIDE = (
    "{names} gets gradients in each backward pass and never moved: it belongs to no module and no optimizer. "
    "Register it as an attribute of a module (`nn.ParameterList` in the place of a list)"
)

_TOO_FEW = (
    "{{names}} should move: after {within} updates {share:.1%} of the elements of one of them differ from their values "
    "at step {first}, at least {least:.1%} should. Look at whether gradients reach it, at its learning rate and at "
    "its group of the optimizer"
)
_MOVED = (
    "{{names}} should stay as at step {first} and changed by the update of step {step}. "
    "Look at requires_grad, at the groups of the optimizer and its weight decay"
)
_CHUNK = 2**20


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
    # Where the gradient of a suspect is largest, and its values there right before this update.
    tests: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class UpdateCheck(Check):
    """Looks at weights right after an update: whether they moved, and whether they are finite."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, _OptimizerUpdates] = {}
        self._outside: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._passes = 0

    def after_pass(self, done: Pass) -> Iterator[Finding]:
        self._passes += 1
        for leaf in done.unregistered() if self._passes <= 3 * WINDOW else ():
            if (part := readable(leaf)) is None:
                continue
            known = self._outside.get(id(leaf))
            if known is None or known[0] is not leaf:
                # Held, so that no other leaf gets its id.
                if len(self._outside) > WINDOW:
                    self._outside.clear()
                self._outside[id(leaf)] = (leaf, sample(part), 1)
                continue
            _, first, passes = known
            self._outside[id(leaf)] = (leaf, first, passes + 1)
            still = passes == 2 * WINDOW and torch.equal(sample(part), first)
            if still and _is_unowned(leaf):
                yield Finding("outside", _OUTSIDE, names=(f"a tensor of shape {list(leaf.shape)}",))

    def before_update(self, update: Update) -> Iterable[Finding]:
        owner = self._owners.setdefault(update.owner, _OptimizerUpdates())
        for index in owner.suspects:
            param = update.params.get(index)
            grad = update.grads.get(index)
            if param is not None and grad is not None:
                at = largest(grad)
                owner.tests[index] = at, torch.take(param, at)
        return ()

    def after_update(self, update: Update) -> Iterable[Finding]:
        owner = self._owners.setdefault(update.owner, _OptimizerUpdates())
        owner.updates += 1
        owner.performed += update.took_place
        number = owner.updates
        if owner.tests:
            tests = owner.tests
            owner.tests = {}
            still = [t for t, (at, old) in tests.items() if _is_still(update.params[t], at, old)]
            waited = {t: owner.suspects[t] for t in still}
            owner.suspects.clear()
            yield from self._causes(owner, update, waited)
        window = (
            number > 1 and number % WINDOW == 1 and (number <= SETTLED + 1 or number % LATER == 1)
        )
        if number == 1:
            owner.usual = _usual_gradient(update)
        if number <= _FIRST or window:
            self._sample(owner, update, window=window)

    def _sample(self, owner: _OptimizerUpdates, update: Update, *, window: bool) -> None:
        having = [t for t in update.indices if t in update.grads]
        new = {t: sample(update.params[t]) for t in having if update.params[t].numel()}
        old = {t: owner.samples.get(t, new[t]) for t in new}
        for indices in by_device(new, new):
            shares = differing([old[t] for t in indices], [new[t] for t in indices])
            finite = torch.stack([new[t].isfinite().all() for t in indices])
            span = owner.updates - owner.sampled if window else 0
            judged = partial(self._judge, owner, update, indices, span)
            update.later(torch.stack([shares, finite.float()]), judged)
        owner.samples = {**owner.samples, **new} if window else {**new, **owner.samples}
        owner.sampled = owner.updates if window else owner.sampled

    def _judge(
        self,
        owner: _OptimizerUpdates,
        update: Update,
        indices: Sequence[int],
        span: int,
        seen: Tensor,
    ) -> Iterator[Finding]:
        """Judge the samples of some tensors; they are compared with those of ``span`` updates before, if any."""
        shares, finite = seen.tolist()
        nonfinite = [t for t, is_finite in zip(indices, finite, strict=True) if not is_finite]
        yield from _broken(update, nonfinite)
        owner.moved.update(t for t, share in zip(indices, shares, strict=True) if share)
        if span:
            owner.suspects = {
                t: owner.suspects.get(t, 0) + span
                for t, share in zip(indices, shares, strict=True)
                if not share
            }

    def _causes(
        self, owner: _OptimizerUpdates, update: Update, waited: dict[int, int]
    ) -> Iterator[Finding]:
        """Yield one finding for each cause for which parameters that should have moved did not."""
        # Compared with earlier ones also: near a minimum all gradients are rounding noise.
        usual = owner.usual = max(owner.usual, _usual_gradient(update) if waited else 0.0)
        found: dict[str, list[tuple[int, str]]] = {}
        for index, updates in waited.items():
            grad = update.grads.get(index)
            if grad is None or not _rms(grad) > _NOISE * usual:
                continue
            cause, patience = _cause(update, index, owner)
            if cause and updates < patience:
                owner.suspects[index] = updates
            elif cause:
                text = _STILL.format(updates=updates) + _consequence(cause, update, index)
                found.setdefault(cause, []).append((index, text))
        for cause, cases in found.items():
            indices, texts = zip(*cases, strict=True)
            if cause == "lr":  # the gradient of some tells nothing, but they are no exception
                groups = update.groups
                still = set(update.indices) - owner.moved
                indices = tuple(t for t in groups if t in still and not _learning_rate(groups[t]))
            yield Finding(cause, texts[0], indices)


def _is_unowned(leaf: Tensor) -> bool:
    # `FullyShardedDataParallel` shows modules and optimizers views of its flat parameter.
    if _dist.is_flattened(leaf):
        return False
    held = [module.parameters(recurse=False) for module in _live.instances(nn.Module)]
    held += [
        g["params"] for o in _live.instances(Optimizer) for g in getattr(o, "param_groups", ())
    ]
    return not any(param is leaf for param in chain.from_iterable(held))


def _is_still(param: Tensor, at: Tensor, old: Tensor) -> bool:
    return not bool(differing([old], [torch.take(param, at)]))


def _cause(update: Update, index: int, owner: _OptimizerUpdates) -> tuple[str, int]:
    param = update.params[index]
    group = update.groups.get(index)
    if index in update.frozen:
        return "frozen", WINDOW
    if group is None:
        # A part in evaluation mode, such as a network inside the loss, is not meant to train.
        cause = "" if update.model.is_resting(index) else "unowned"
        return cause, PATIENCE if param.dtype in _numbers.HALF else WINDOW
    if not owner.performed:
        return "skipped", WINDOW
    lr = _learning_rate(group)
    is_unwritten = bool(lr) and _should_move(update, index, lr)
    # A schedule that ends, a proximal step that holds a weight at 0, or an optimizer that stops at a tolerance.
    is_over = index in owner.moved and not is_unwritten
    if is_over or not bool(param.detach().any()) or "tolerance_grad" in group:
        return "", 0
    if not lr:
        return "lr", PATIENCE
    has_copy = any(
        isinstance(one, Tensor) and one.numel() == param.numel() and one.dtype == torch.float32
        for one in update.state.get(index, {}).values()
    )
    patience = PATIENCE if param.dtype in _numbers.HALF and has_copy else WINDOW
    return "unwritten" if is_unwritten else "rounded", patience


def _consequence(cause: str, update: Update, index: int) -> str:
    param = update.params[index]
    dtype = str(param.dtype).removeprefix("torch.")
    return _CAUSES[cause].format(
        rule=update.frozen.get(index),
        lr=_learning_rate(update.groups.get(index, {})),
        dtype=dtype,
        remedy=(_REDUCED if param.dtype in _numbers.HALF else _FULL).format(dtype=dtype),
    )


def _learning_rate(group: Mapping[str, Any]) -> float:
    return float(group.get("lr", 1.0))


def _should_move(update: Update, index: int, lr: float) -> bool:
    param = update.params[index]
    state = update.state.get(index, {})
    grad = update.grads[index]
    size = grad.detach().to_dense().abs().float() if grad.is_sparse else grad.detach().abs().float()
    # Optimizers with second moments divide a gradient by its usual size. A noisy one moves by a tenth of that.
    if any("sq" in key or key == "sum" for key in state):
        size = size.gt(0).float() / 10
    gap = param.detach().abs().float() * torch.finfo(param.dtype).eps
    return bool((lr * size > 2 * gap).any())


def _broken(update: Update, nonfinite: Sequence[int]) -> Iterator[Finding]:
    having = [t for t in nonfinite if t in update.grads]
    finite = [t for t in having if bool(_numbers.values(update.grads[t]).isfinite().all())]
    if finite:
        yield Finding("non-finite", _BROKEN, tuple(finite))


def _rms(grad: Tensor) -> float:
    values = _numbers.values(grad)
    sizes = (values.abs() if values.is_complex() else values).float()
    return float(sizes.square().mean().sqrt()) if sizes.numel() else 0.0


def _usual_gradient(update: Update) -> float:
    sizes = [_rms(update.grads[t]) for t in update.indices if t in update.grads]
    return float(torch.tensor(sizes).median()) if sizes else 0.0


class MovedCheck(Check):
    """Compares weights right after updates with those before the first one.

    A share of ``least`` elements must differ once ``within`` performed updates, or all elements are to stay ``unmoved``.
    """

    def __init__(self, *, least: float = 0.0, within: int = 0, unmoved: bool = False) -> None:
        self._least = least
        self._within = within
        self._unmoved = unmoved
        self._first: dict[int, Tensor] = {}
        self._steps: dict[int, int] = {}
        self._updates: dict[int, int] = {}

    def before_update(self, update: Update) -> Iterable[Finding]:
        take = fingerprint if self._unmoved else sample
        for index in update.indices:
            param = update.params.get(index)
            if index not in self._steps and param is not None and param.numel():
                self._first[index] = take(param)
                self._steps[index] = update.step
                self._updates[index] = 0
        return ()

    def after_update(self, update: Update) -> Iterable[Finding]:
        watched = [t for t in update.indices if t in self._first and t in update.params]
        take = fingerprint if self._unmoved else sample
        new = {t: take(update.params[t]) for t in watched}
        for index in watched:
            self._updates[index] += update.took_place
        for indices in by_device(watched, new):
            shares = differing([self._first[t] for t in indices], [new[t] for t in indices])

            def judge(seen: Tensor, indices: Sequence[int] = indices) -> Iterator[Finding]:
                return self._judge(update, dict(zip(indices, seen.tolist(), strict=True)))

            update.later(shares, judge)
        return ()

    def _judge(self, update: Update, shares: dict[int, float]) -> Iterator[Finding]:
        if self._unmoved:
            if moved := [t for t, share in shares.items() if share]:
                text = _MOVED.format(first=self._steps[moved[0]], step=update.step)
                yield Finding("moved", text, tuple(moved))
            return
        for index in [t for t, share in shares.items() if share >= self._least]:
            self._first.pop(index, None)
        late = [t for t in shares if t in self._first and self._updates[t] >= self._within]
        if late:
            share = min(shares[t] for t in late)
            first = self._steps[late[0]]
            text = _TOO_FEW.format(within=self._within, share=share, first=first, least=self._least)
            yield Finding("unmoved", text, tuple(late))
        for index in late:
            del self._first[index]


def fingerprint(tensor: Tensor) -> Tensor:
    """Return two sums over the bits of a tensor, shape ``[2]``: any change of an element changes one."""
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8).view(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        wide = chunk.to(torch.int64)
        # Sums modulo 2^64. Odd weights make a change of one element visible, other weights an exchange of two.
        places = torch.arange(len(wide), device=wide.device) + number * _CHUNK
        sums += torch.stack([(wide * (2 * places + 1)).sum(), (wide * (places * places + 1)).sum()])
    return sums
