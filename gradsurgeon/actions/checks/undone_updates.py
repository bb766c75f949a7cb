"""Finds updates that the script undoes, by writing the values from before them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradsurgeon.actions.checks import idle_settings
from gradsurgeon.actions.checks.base import Finding, Findings, Pass, Update
from gradsurgeon.actions.checks.models_of_passes import twins
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck
from gradsurgeon.tensors.readable import readable
from gradsurgeon.tensors.sampling import sample

_IN_A_ROW = 10
_UNDONE = (
    "each of the last {updates} updates of {{names}} was undone before the next backward pass: the script has put back the values "
    "from before the update. Look for a copy of the weights that is written after `optimizer.step()`"
)


class UndoneUpdates(OptimizerCheck):
    """Compares samples of weights, the last time all elements. Most trainings show at their second pass that they keep updates."""

    def __init__(self) -> None:
        # The parameters with gradients, as they were before the last update.
        self._before: dict[int, Tensor] = {}
        self._in_a_row = 0
        self._rests = False

    def before_update(self, update: Update) -> Findings:
        if not self._rests:
            indices = update.groups.keys() & update.grads.keys()
            self._before = {index: self._values(update.params[index]) for index in indices}
        return ()

    def after_update(self, update: Update) -> Findings:
        self._rests = self._rests or not self._have_changed(update.params)
        return ()

    def before_pass(self, starting: Pass) -> Findings:
        if self._rests or not self._before:
            return
        # Averages, bounds and searches write other values, and some scripts put values back to freeze a part.
        self._rests = self._have_changed(starting.params)
        indices = tuple(sorted(self._before))
        self._before = {}
        self._in_a_row += 1
        if self._in_a_row > _IN_A_ROW and not self._rests:
            self._rests = True
            # Clients of federated rounds begin each from a copy that is loaded, or from a model that is kept.
            is_fact = not idle_settings.sees_no_load(starting.model.holder(indices[0]))
            root = starting.model.root()
            if root is not None:
                is_fact |= any(_are_equal(root, twin) for twin in twins(root))
            yield Finding("undone", _UNDONE.format(updates=_IN_A_ROW), indices, is_fact=is_fact)

    def _values(self, param: Tensor) -> Tensor:
        # A script may put back all rows but a few.
        if self._in_a_row == _IN_A_ROW:
            return param.clone()
        return sample(param)

    def _have_changed(self, params: Mapping[int, Tensor]) -> bool:
        for index, before in self._before.items():
            if index not in params or not torch.equal(before, self._values(params[index])):
                return True
        return False


def _are_equal(model: nn.Module, twin: nn.Module) -> bool:
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        first = readable(param)
        second = readable(other)
        if first is None or second is None or not torch.equal(first.cpu(), second.cpu()):
            return False
    return True
