"""Finds parameters of an optimizer that never get a gradient, or only gradients of 0, and never move."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from gradsurgeon.actions.checks.base import Finding, Model, Update
from gradsurgeon.tensors import _dist, _numbers, _unsaved_hooks
from gradsurgeon.tensors.sampling import sample

# At the first look candidates are noted, at the second known causes are told, at the third unknown ones too.
FIRST = 10
SECOND = 20
THIRD = 200

_SILENT = (
    "{number} of {owned} trained parameters, {{names}}, never got a gradient in {updates} updates: "
)
_REENTRANT = (
    "they run in a reentrant checkpoint whose inputs need no gradient. Pass `use_reentrant=False` to `checkpoint`, or "
    "call `model.enable_input_require_grads()`"
)
_UNRECORDED = "they run under `torch.no_grad()`. Take them out of it, or set requires_grad to False"
_UNREACHED = "they run, and the loss does not depend on them. Look for `detach()`, `.data`, or an output that the loss leaves out"
_ZEROS = (
    "{names} are 0 and get gradients of exactly 0, because each is multiplied by another. Initialise one of each pair "
    "with random numbers"
)
_RESTING = (
    "{number} of {owned} trained parameters, {{names}}, never moved in {updates} updates: their gradients are exactly 0. "
    "Look for a factor that is 0, units that are always off, or a loss without effect"
)
# How a module can run.
_CHECKPOINTED = "checkpointed"
_WITHOUT_GRADIENT = "without gradient"
_RECORDED = "recorded"


class DeadParams:
    """Follows the parameters of one optimizer that got no gradient at the first look."""

    def __init__(self) -> None:
        # By parameter, a sample of its values at the first look.
        self._silent: dict[int, Tensor] = {}
        # Factors that hold each other at 0.
        self._zeros: tuple[int, ...] = ()
        self._calls = WatchedCalls()

    def reached(self, indices: Iterable[int]) -> None:
        """Note a pass: what it reached is not dead."""
        if self._silent:
            for index in indices:
                self._silent.pop(index, None)

    def close(self) -> None:
        self._calls.close()

    def after_update(
        self,
        update: Update,
        number: int,
        moved: Collection[int],
        samples: Mapping[int, Tensor],
    ) -> Iterator[Finding]:
        """Look at the update with this number of its optimizer; `samples` are earlier values of those with gradients."""
        if self._silent:
            self.reached(update.grads)
        if number == FIRST:
            self._note_silent(update, samples)
        elif number == SECOND:
            self._calls.close()
            yield from self._told(update, number, {_CHECKPOINTED: _REENTRANT})
            self._zeros = _zeros(update, moved, samples)
            if self._zeros:
                yield Finding("zeros", _ZEROS, self._zeros)
        elif number == THIRD:
            causes = {_WITHOUT_GRADIENT: _UNRECORDED, _RECORDED: _UNREACHED}
            yield from self._told(update, number, causes)
            yield from _resting(update, number, {*moved, *self._zeros}, samples)
            self._silent.clear()

    def _note_silent(self, update: Update, samples: Mapping[int, Tensor]) -> None:
        params = update.params
        for index in _owned(update):
            is_candidate = index not in samples and index not in update.grads
            if is_candidate and params[index].requires_grad:
                self._silent[index] = sample(params[index])
        self._calls.watch(update.model, self._silent)

    def _told(self, update: Update, number: int, causes: dict[str, str]) -> Iterator[Finding]:
        """Yield a finding for each cause, by the way in which the modules of silent parameters ran."""
        idle = update.model.idle_branches(self._silent)
        for way, cause in causes.items():
            indices = []
            for index, before in self._silent.items():
                is_told = self._calls.ways.get(index) == {way} and index not in idle
                if is_told and torch.equal(sample(update.params[index]), before):
                    indices.append(index)
            if indices:
                owned = len(update.groups)
                text = _SILENT.format(number=len(indices), owned=owned, updates=number) + cause
                yield Finding(f"silent-{way}", text, tuple(indices))


class WatchedCalls:
    """Watches for a while in which ways the modules of some parameters run."""

    def __init__(self) -> None:
        self.ways: dict[int, set[str]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, model: Model, indices: Iterable[int]) -> None:
        for index in indices:
            holder = model.holder(index)
            if holder is None or isinstance(holder, torch.jit.ScriptModule):
                continue
            ways = self.ways.setdefault(index, set())
            handle = holder.register_forward_pre_hook(_Note(ways))
            _unsaved_hooks.leave_behind(handle)
            self._handles.append(handle)

    def close(self) -> None:
        for handle in self._handles:
            _unsaved_hooks.take_off(handle)
        self._handles.clear()


class _Note:
    """A hook that notes in which way a module runs."""

    def __init__(self, ways: set[str]) -> None:
        self._ways = ways

    def __call__(self, module: nn.Module, args: Any) -> None:
        del args
        if torch.is_grad_enabled():
            self._ways.add(_RECORDED)
        elif module.training and _is_in_reentrant_checkpoint():
            self._ways.add(_CHECKPOINTED)
        elif module.training:
            self._ways.add(_WITHOUT_GRADIENT)


def _is_in_reentrant_checkpoint() -> bool:
    code = CheckpointFunction.forward.__code__
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # `inspect.stack` reads source files
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _owned(update: Update) -> list[int]:
    """Return the parameters of the optimizer that are no tables: another batch may reach other rows."""
    indices = []
    for index in update.groups:
        param = update.params.get(index)
        is_table = update.model.kinds.get(index, "").startswith("Embedding")
        is_plain = param is not None and type(param) in _dist.PLAIN and param.numel() > 0
        if is_plain and not is_table:
            indices.append(index)
    return indices


def _at_zero(update: Update, moved: Collection[int], samples: Mapping[int, Tensor]) -> list[int]:
    """Return the parameters that have never moved, and whose gradients are exactly 0. Waits for the device."""
    indices = []
    for index in _owned(update):
        grad = update.grads.get(index)
        if index in moved or grad is None or index not in samples or update.model.is_resting(index):
            continue
        is_still = torch.equal(sample(update.params[index]), samples[index])
        if is_still and not bool(_numbers.values(grad).any()):
            indices.append(index)
    idle = update.model.idle_branches(indices)
    return [index for index in indices if index not in idle]


def _zeros(
    update: Update, moved: Collection[int], samples: Mapping[int, Tensor]
) -> tuple[int, ...]:
    """Return factors that hold each other at 0."""
    factors = []
    for index in _at_zero(update, moved, samples):
        param = update.params[index].detach()
        if param.dim() > 1 and not bool(param.any()):
            factors.append(index)
    # A factor alone is held by no other.
    if len(factors) <= 1:
        return ()
    return tuple(factors)


def _resting(
    update: Update, number: int, moved: Collection[int], samples: Mapping[int, Tensor]
) -> Iterator[Finding]:
    holder = update.model.holder
    # Beside a weight that moves, a bias may have a gradient of 0 by mathematics.
    learning = {id(holder(index)) for index in moved}
    still = _at_zero(update, moved, samples)
    indices = [index for index in still if id(holder(index)) not in learning]
    if indices:
        text = _RESTING.format(number=len(indices), owned=len(update.groups), updates=number)
        yield Finding("resting", text, tuple(indices))
