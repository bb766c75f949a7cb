"""Finds parameters of an optimizer that never get a gradient, or only gradients of 0, and never move."""

from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from gradsurgeon.actions.checks.base import Finding, Findings, Pass, Update
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck
from gradsurgeon.tensors import _dist, _unsaved_hooks
from gradsurgeon.tensors.sampling import sample

# At the first look candidates are noted, at the second known causes are reported, at the third all causes.
FIRST = 10
SECOND = 20
THIRD = 200
_TORCH = torch.__file__.removesuffix("__init__.py")

_NUMBER = "{number} of {owned} trained parameters, {{names}}, never "
_SILENT = f"{_NUMBER}got a gradient in {{updates}} updates: they run"
_TEXTS = {
    "reentrant": f"{_SILENT} in a reentrant checkpoint at {{place}} whose inputs need no gradient. Pass `use_reentrant=False` to "
    "`checkpoint`, or call `model.enable_input_require_grads()`",
    "unreached": f"{_SILENT}, and the loss does not depend on them. Look for `torch.no_grad()`, `detach()`, `.data`, or an "
    "unused output",
    "resting": f"{_NUMBER}moved in {{updates}} updates: their gradients are exactly 0. Look for a factor that is 0, units that "
    "are always off, or a loss without effect",
}


class DeadParams(OptimizerCheck):
    """Follows the parameters of one optimizer that have not moved at the first look."""

    def __init__(self) -> None:
        # The parameters that passes have reached.
        self._reached: set[int] = set()
        # Maps each parameter to a sample of its values at the first look.
        self._samples: dict[int, Tensor] = {}
        # Maps each parameter to how its module last ran, a key of `_TEXTS`; none if it has not run.
        self._calls: dict[int, str] = {}
        # The line that calls the reentrant checkpoint.
        self._place = ""
        self._handles: list[RemovableHandle] = []

    def close(self) -> None:
        while self._handles:
            _unsaved_hooks.take_off(self._handles.pop())

    def after_pass(self, done: Pass) -> Findings:
        self._reached.update(done.reached)
        return ()

    def after_update(self, update: Update) -> Findings:
        number = self.owner.updates + 1
        if number == FIRST:
            self._note(update)
        if number not in (SECOND, THIRD):
            return
        self.close()
        model = update.model
        learning = {model.holder(index) for index in self.owner.moved}
        by_cause: dict[str, list[int]] = {cause: [] for cause in _TEXTS}
        for index in self._dead(update):
            cause = self._cause(update, index)
            # Beside a weight that moves, a bias may have a gradient of 0 by mathematics.
            is_inert = cause == "resting" and model.holder(index) in learning
            if cause and not is_inert and index not in self.owner.explained:
                by_cause[cause].append(index)
        for cause, indices in by_cause.items():
            if indices and (number == THIRD or cause == "reentrant"):
                facts = {"number": len(indices), "owned": len(update.groups), "updates": number}
                text = _TEXTS[cause].format(**facts, place=self._place)
                yield Finding(cause, text, tuple(indices))

    def _note(self, update: Update) -> None:
        for index in update.groups.keys() & update.params.keys() - self.owner.moved:
            param = update.params[index]
            # Another batch may reach other rows of a table. A part in evaluation mode is not meant to train.
            is_table = update.model.kinds.get(index, "").startswith("Embedding")
            if is_table or update.model.is_resting(index) or not _is_plain(param):
                continue
            self._samples[index] = sample(param)
            module = update.model.holder(index)
            if (
                index in self._reached
                or module is None
                or isinstance(module, torch.jit.ScriptModule)
            ):
                continue
            handle = module.register_forward_pre_hook(partial(self._note_call, index))
            _unsaved_hooks.leave_behind(handle)
            self._handles.append(handle)

    def _dead(self, update: Update) -> list[int]:
        """Return the parameters that have never moved. Waits for the device."""
        still = self._samples.keys() & update.params.keys() - self.owner.moved
        dead = set()
        for index in still:
            if torch.equal(sample(update.params[index]), self._samples[index]):
                dead.add(index)
        return sorted(dead - update.model.idle_branches(dead))

    def _cause(self, update: Update, index: int) -> str:
        """Return why a parameter does not move, a key of `_TEXTS`; empty if the next batch may move it."""
        if index not in update.grads:
            return "" if index in self._reached else self._calls.get(index, "")
        return "" if update.is_any([index]) else "resting"

    def _note_call(self, index: int, module: nn.Module, args: Any) -> None:
        """Note how the module of a parameter is about to run."""
        del args
        if not torch.is_grad_enabled() and not module.training:
            return
        self._calls[index] = "unreached"
        is_inside = False
        for frame, line in walk_stack(None):
            file = frame.f_code.co_filename
            is_inside |= frame.f_code is CheckpointFunction.forward.__code__
            if is_inside and not file.startswith(_TORCH):
                self._calls[index] = "reentrant"
                self._place = f"{file}:{line}"
                return


def _is_plain(param: Tensor) -> bool:
    return type(param) in _dist.PLAIN and param.requires_grad and param.numel() > 0
