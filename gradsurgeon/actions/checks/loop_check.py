"""Finds faults of a training loop: gradients kept too long or lost, scaled clips, modes, losses."""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.optim import Optimizer

from gradsurgeon.actions.checks.base import Check, Finding, Pass, Update, owned_ids
from gradsurgeon.common import _live
from gradsurgeon.tensors import _numbers
from gradsurgeon.tensors.sampling import largest

# A script may do something once on purpose. It is reported from the third update in a row on.
IN_A_ROW = 3
# After so many updates without a fault, only one in a hundred is looked at.
SETTLED = 20
LATER = 100
# So few parameters tell whether gradients were cleared: a script clears all of an optimizer or none.
_MOST_SAMPLED = 4
_MOST_FLAGS = 256
# No update has come from a forward pass in training mode yet.
_NEVER = -1
_ALIKE = 1e-3
_APART = 1e-2

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
_CLIPPED = (
    "the script clips gradients to {what} of {norm:.3g} while they still carry the loss scale of {scale:.6g}, so the "
    "true bound is {bound:.1e}. Call `scaler.unscale_(optimizer)` before `clip_grad_norm_`"
)
_EVALUATED = (
    "since step {since} each forward pass that feeds an update has run in evaluation mode: dropout is off, and batch "
    "norms use their running statistics. Call `model.train()` after each evaluation"
)
_LOSS = "the loss of step {step}{maker} was {value} although all gradients are finite. {remedy}"
_NOTHING = (
    "A mean over nothing is NaN: look for a batch that is empty or in which every label is ignored"
)
_MAYBE_NOTHING = "Two things are NaN with finite gradients: a mean over nothing (an empty batch) and the logarithm of a negative number"
_GROWN = (
    "It has outgrown its dtype, or is made of the logarithm of 0: look at the losses before this step, at the learning rate, "
    "and at what goes into a logarithm"
)
# Losses that leave out ignored labels.
_OVER_LABELS = ("nll_loss", "ctc_loss")
_BY_A_NUMBER = frozenset({"MulBackward0", "DivBackward0"})
# A clip that takes the scale into account has a bound near this times a usual one.
_LEAST_BOUND = 1e-2


@dataclass(slots=True)
class _LoopState:
    updates: int = 0
    last_step: int = -1
    # Maps each sampled parameter to places of its gradient and the values there at the last update.
    used: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # Sampled parameters that kept their gradients into a new pass.
    kept: set[int] = field(default_factory=set)
    # By pass since the last update, whether it gave the sampled parameters other gradients than 0; 0-dim tensors.
    got_gradients: list[Tensor] = field(default_factory=list)
    stale_in_a_row: int = 0
    gone_in_a_row: int = 0
    # Whether an update found gradients that still carry the loss scale.
    is_scaled: bool = False
    # By such an update: norm and largest element after its last pass, and right before it.
    clips: list[tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=list)
    sizes_after_pass: tuple[float, ...] = ()
    indices: Sequence[int] = ()
    sampled: Sequence[int] = ()

    @property
    def looks(self) -> bool:
        return self.updates < SETTLED or self.updates % LATER < IN_A_ROW


class LoopCheck(Check):
    """Looks at gradients before and after passes and updates, and at the loss and the mode of the model."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, _LoopState] = {}
        # The number of evaluations before the last update from forward passes in training mode; the steps since then.
        self._evaluations_before: int | None = _NEVER
        self._evaluated_steps: list[int] = []
        # Whether the script changes the mode itself: back after an evaluation, or for training.
        self._mode_is_meant = False
        self._modes: set[bool] = set()
        # Losses that were not finite, in passes that may feed the next update.
        self._nonfinite_losses: list[Finding] = []

    def before_pass(self, starting: Pass) -> Iterable[Finding]:
        for owner in self._owners.values():
            used = owner.used
            owner.used = {}
            grads = starting.grads
            for index, (places, values) in used.items():
                if _is_kept(grads.get(index), places, values):
                    owner.kept.add(index)
            owner.kept = {index for index in owner.kept if any(_any_of(grads, (index,)))}
            # The script has cleared the gradients of a non-finite loss.
            if self._nonfinite_losses and not any(_any_of(grads, owner.sampled)):
                self._nonfinite_losses.clear()
        return ()

    def after_pass(self, done: Pass) -> Iterable[Finding]:
        for owner in self._owners.values():
            # Its optimizer may have made its last update.
            if owner.looks and len(owner.got_gradients) < _MOST_FLAGS:
                owner.got_gradients += _any_of(done.grads, owner.sampled)
            if owner.is_scaled and len(owner.clips) < IN_A_ROW:
                owner.sizes_after_pass = _sizes(done.grads, owner.indices)
        is_evaluated = done.model.is_evaluated()
        if is_evaluated is not None:
            self._modes.add(is_evaluated)
        if done.loss is not None:
            done.later(done.loss.float(), partial(self._judge_loss, done))
        return ()

    def before_unscaling(self, update: Update) -> Iterator[Finding]:
        return _clipped(self._owners.setdefault(update.owner, _LoopState()), update)

    def before_update(self, update: Update) -> Iterator[Finding]:
        owner = self._owners.setdefault(update.owner, _LoopState())
        if owner.looks:
            owner.indices = list(update.groups)
            stride = max(1, len(owner.indices) // _MOST_SAMPLED)
            owner.sampled = owner.indices[::stride][:_MOST_SAMPLED]
            _look_for_gone(owner, update)
            yield from _stale(owner, update)
        findings = self._nonfinite_losses
        self._nonfinite_losses = []
        yield from findings
        yield from self._judge_mode(update)

    def after_update(self, update: Update) -> Iterable[Finding]:
        owner = self._owners.setdefault(update.owner, _LoopState())
        owner.updates += 1
        owner.last_step = update.step
        owner.kept = set()
        owner.got_gradients = []
        owner.sizes_after_pass = ()
        if owner.looks:
            for index, grad in _dense_grads(update.grads, owner.sampled).items():
                places = largest(grad)
                owner.used[index] = (places, torch.take(grad, places))
        return ()

    def _judge_loss(self, done: Pass, seen: Tensor) -> Iterable[Finding]:
        loss = float(seen)
        if math.isfinite(loss):
            return ()
        # The trap reports a NaN that is in the gradients also.
        for index in done.indices:
            if index in done.grads and not done.has_finite_grad(index):
                return ()
        value = f"{loss:g}"
        maker = _maker(done)
        remedy = _GROWN
        if math.isnan(loss):
            value = "NaN"
            remedy = _MAYBE_NOTHING
            if any(label_loss in maker for label_loss in _OVER_LABELS):
                remedy = _NOTHING
        text = _LOSS.format(step=done.step, maker=maker, value=value, remedy=remedy)
        self._nonfinite_losses.append(Finding("loss", text, step=done.step))
        return ()

    def _judge_mode(self, update: Update) -> Iterator[Finding]:
        modes = self._modes
        self._modes = set()
        count = update.evaluations
        before = self._evaluations_before
        if False in modes:
            if before not in (_NEVER, count):
                self._mode_is_meant = True
            self._evaluations_before = count
            self._evaluated_steps = []
        elif modes and before != _NEVER:
            if not self._evaluated_steps and count is not None and count == before:
                self._mode_is_meant = True
            self._evaluated_steps.append(update.step)
            if len(self._evaluated_steps) == IN_A_ROW and not self._mode_is_meant:
                yield Finding("mode", _EVALUATED.format(since=self._evaluated_steps[0]))


def _maker(done: Pass) -> str:
    """Return the operation that made the loss, such as ``nll_loss``; multiplying by a number made none."""
    if done.graph is None:
        return ""
    node: Any = done.graph.roots[0]
    while isinstance(node, Node) and node.name() in _BY_A_NUMBER:
        node, _ = node.next_functions[0]
    if not isinstance(node, Node):
        return ""
    operation = node.name().partition("Backward")[0]
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", operation).lower()
    return f" (made by `{name}`)"


def _any_of(grads: Mapping[int, Tensor], indices: Sequence[int]) -> list[Tensor]:
    """Return whether some gradients have an element other than 0, a 0-dim tensor each."""
    return [_numbers.values(grads[index]).any() for index in indices if index in grads]


def _dense_grads(grads: Mapping[int, Tensor], indices: Sequence[int]) -> dict[int, Tensor]:
    """Return those gradients that are dense and have elements. A rank may hold no element of a gradient."""
    held = {index: grads[index] for index in indices if index in grads}
    return {
        index: grad for index, grad in held.items() if grad.layout == torch.strided and grad.numel()
    }


def _look_for_gone(owner: _LoopState, update: Update) -> None:
    """Ask whether the gradients that passes gave have gone before the update."""
    number = len(owner.got_gradients)
    if number:
        flags = [*owner.got_gradients, *_any_of(update.grads, owner.sampled)]
        device = flags[0].device
        values = torch.stack([flag.to(device) for flag in flags])
        update.later(values, partial(_judge_gone, owner, update, number))


def _judge_gone(owner: _LoopState, update: Update, number: int, seen: Tensor) -> Iterator[Finding]:
    """Judge what so many flags say of passes, and the others of the update."""
    are_gone = bool(seen[:number].any()) and not bool(seen[number:].any())
    owner.gone_in_a_row += 1
    # The script may clear the sampled parameters on purpose: then other parameters have gradients.
    if not are_gone or any(_any_of(update.grads, update.indices)):
        owner.gone_in_a_row = 0
    if owner.gone_in_a_row != IN_A_ROW:
        return
    first = owner.sampled[0]
    holders = _optimizers_of(update, first)
    if len(holders) > 1:
        kinds = " and ".join(type(optimizer).__name__ for optimizer in holders)
        text = _SHARED.format(number=len(holders), kinds=kinds, step=update.step)
        yield Finding("shared", text, tuple(update.groups))
    else:
        yield Finding("gone", _GONE.format(step=update.step), (first,))


def _optimizers_of(update: Update, index: int) -> list[Optimizer]:
    """Return all optimizers that hold a parameter."""
    (param,) = update.find((index,))
    return [
        optimizer for optimizer in _live.instances(Optimizer) if id(param) in owned_ids(optimizer)
    ]


def _is_kept(grad: Tensor | None, places: Tensor, old: Tensor) -> bool:
    if grad is None or not bool(old.any()):
        return False
    return torch.equal(torch.take(grad, places), old)


def _stale(owner: _LoopState, update: Update) -> Iterator[Finding]:
    """Yield a finding if gradients that were there before the last update reach this one, again and again."""
    stale = sorted(owner.kept.intersection(update.grads))
    owner.stale_in_a_row += 1
    if not stale:
        owner.stale_in_a_row = 0
    if owner.stale_in_a_row == IN_A_ROW:
        # Any of the sampled parameters stands for all that the script has not cleared.
        text = _STALE.format(step=update.step, before=owner.last_step)
        yield Finding("stale", text, (stale[0],))


def _sizes(grads: Mapping[int, Tensor], indices: Sequence[int]) -> tuple[float, ...]:
    """Return the norm and the largest element of all dense gradients."""
    dense = list(_dense_grads(grads, indices).values())
    if not dense:
        return ()
    norm = torch.nn.utils.get_total_norm(dense)
    most = torch.nn.utils.get_total_norm(dense, math.inf)
    return float(norm), float(most)


def _clipped(owner: _LoopState, update: Update) -> Iterator[Finding]:
    """Yield a finding if gradients that still carry the loss scale always come to the same, smaller size."""
    if update.scale is None or len(owner.clips) == IN_A_ROW:
        return
    # Sizes after a pass are taken from the second update on: then the scale is known.
    owner.is_scaled = True
    now = _sizes(update.grads, owner.indices)
    if owner.sizes_after_pass and now:
        owner.clips.append((owner.sizes_after_pass, now))
    if len(owner.clips) < IN_A_ROW:
        return
    sizes = torch.tensor(owner.clips)
    for place, what in enumerate(("a norm", "elements")):
        whole, clipped = sizes[:, :, place].T
        norm = float(clipped[0])
        bound = norm / update.scale
        if bound < _LEAST_BOUND and _is_clip(whole, clipped):
            text = _CLIPPED.format(what=what, norm=norm, scale=update.scale, bound=bound)
            yield Finding("clipped", text)
            return


def _is_clip(whole: Tensor, clipped: Tensor) -> bool:
    """Tell whether different sizes were brought to one size. A division by a constant gives one ratio."""
    are_reduced = (clipped > 0) & (clipped < whole / 2)
    if not bool(are_reduced.all()):
        return False
    return _spread(clipped) < _ALIKE and _spread(clipped / whole) > _APART


def _spread(values: Tensor) -> float:
    return float((values.max() - values.min()) / values.max())
