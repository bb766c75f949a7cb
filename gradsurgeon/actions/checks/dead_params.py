"""Finds parameters of an optimizer that never get a gradient, or only gradients of 0, and never move."""

from collections.abc import Collection, Iterator
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from gradsurgeon.actions.checks.base import Finding, Update
from gradsurgeon.tensors import _dist, _numbers, _unsaved_hooks
from gradsurgeon.tensors.sampling import sample

# At the first look candidates are noted, at the second known causes are reported, at the third all causes.
FIRST = 10
SECOND = 20
THIRD = 200
_KNOWN = ("reentrant", "zeros")

_NUMBER = "{number} of {owned} trained parameters, {{names}}, never "
_SILENT = f"{_NUMBER}got a gradient in {{updates}} updates: they run"
_TEXTS = {
    "reentrant": f"{_SILENT} in a reentrant checkpoint whose inputs need no gradient. Pass `use_reentrant=False` to "
    "`checkpoint`, or call `model.enable_input_require_grads()`",
    "unreached": f"{_SILENT}, and the loss does not depend on them. Look for `torch.no_grad()`, `detach()`, `.data`, or an "
    "unused output",
    "zeros": "{{names}} are 0 and get gradients of exactly 0, because each is multiplied by another. Initialise one of each "
    "pair with random numbers",
    "resting": f"{_NUMBER}moved in {{updates}} updates: their gradients are exactly 0. Look for a factor that is 0, units that "
    "are always off, or a loss without effect",
}


class DeadParams:
    """Follows the parameters of one optimizer that have not moved at the first look."""

    def __init__(self) -> None:
        # Maps each parameter to a sample of its values at the first look.
        self._samples: dict[int, Tensor] = {}
        # Maps each parameter to how its module last ran, a key of `_TEXTS`; none if it has not run.
        self._calls: dict[int, str] = {}
        self._handles: list[RemovableHandle] = []

    def close(self) -> None:
        while self._handles:
            _unsaved_hooks.take_off(self._handles.pop())

    def after_update(
        self, update: Update, number: int, moved: Collection[int], reached: Collection[int]
    ) -> Iterator[Finding]:
        """Look at the update with this number, given the parameters that have moved, and that passes have reached."""
        if number == FIRST:
            self._note(update, moved, reached)
        if number not in (SECOND, THIRD):
            return
        self.close()
        by_cause: dict[str, list[int]] = {cause: [] for cause in _TEXTS}
        learning = {id(update.model.holder(index)) for index in moved}
        for index in self._dead(update, moved):
            cause = self._cause(update, index, reached)
            # Beside a weight that moves, a bias may have a gradient of 0 by mathematics.
            is_inert = cause == "resting" and id(update.model.holder(index)) in learning
            if cause and not is_inert:
                by_cause[cause].append(index)
        # A factor alone is held at 0 by no other.
        if len(by_cause["zeros"]) == 1:
            del by_cause["zeros"]
        for cause, indices in by_cause.items():
            if indices and (number == THIRD or cause in _KNOWN):
                owned = len(update.groups)
                text = _TEXTS[cause].format(number=len(indices), owned=owned, updates=number)
                yield Finding(cause, text, tuple(indices))

    def _note(self, update: Update, moved: Collection[int], reached: Collection[int]) -> None:
        for index in update.groups:
            param = update.params.get(index)
            if index in moved or param is None or not _is_plain(param):
                continue
            # Another batch may reach other rows of a table. A part in evaluation mode is not meant to train.
            is_table = update.model.kinds.get(index, "").startswith("Embedding")
            if is_table or update.model.is_resting(index):
                continue
            self._samples[index] = sample(param)
            module = update.model.holder(index)
            if index in reached or module is None or isinstance(module, torch.jit.ScriptModule):
                continue
            handle = module.register_forward_pre_hook(partial(_note_call, self._calls, index))
            _unsaved_hooks.leave_behind(handle)
            self._handles.append(handle)

    def _dead(self, update: Update, moved: Collection[int]) -> list[int]:
        """Return the parameters that have never moved. Waits for the device."""
        still = [index for index in self._samples if index in update.params and index not in moved]
        dead = {
            index
            for index in still
            if torch.equal(sample(update.params[index]), self._samples[index])
        }
        return sorted(dead - update.model.idle_branches(dead))

    def _cause(self, update: Update, index: int, reached: Collection[int]) -> str:
        """Return why a parameter does not move, a key of `_TEXTS`; empty if the next batch may move it."""
        grad = update.grads.get(index)
        if grad is None:
            if index in reached:
                return ""
            return self._calls.get(index, "")
        if bool(_numbers.values(grad).any()):
            return ""
        param = update.params[index].detach()
        if param.dim() > 1 and not bool(param.any()):
            return "zeros"
        return "resting"


def _note_call(calls: dict[int, str], index: int, module: nn.Module, args: Any) -> None:
    """Note how the module of a parameter is about to run."""
    del args
    if torch.is_grad_enabled():
        calls[index] = "unreached"
    elif module.training:
        calls[index] = "unreached"
        if _is_in_reentrant_checkpoint():
            calls[index] = "reentrant"


def _is_in_reentrant_checkpoint() -> bool:
    code = CheckpointFunction.forward.__code__
    return any(frame.f_code is code for frame, _ in walk_stack(None))


def _is_plain(param: Tensor) -> bool:
    return type(param) in _dist.PLAIN and param.requires_grad and param.numel() > 0
