"""Finds parameters that trained, were frozen, and are still moved by their optimizer: by momentum or weight decay."""

from collections import Counter

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Finding, Findings, Update
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck
from gradsurgeon.tensors.sampling import dense_grads, sample

_IN_A_ROW = 3
_MOVED = (
    "{names} moved in three updates in a row although requires_grad is False: the optimizer finds gradients of 0, or old ones, and "
    "momentum or weight decay moves {it}. Set the gradients to None after freezing (`zero_grad(set_to_none=True)`), or take {it} out "
    "of the optimizer"
)


class FrozenMoves(OptimizerCheck):
    """Looks at the parameters of one optimizer that are frozen and still have gradients. In most trainings there are none."""

    def __init__(self) -> None:
        # The parameters that updated with a gradient while they were not frozen.
        self._trained: set[int] = set()
        # Samples of frozen parameters: of the weight before this update, and of the gradient at the last one.
        self._weights: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        # The updates in a row that moved a frozen parameter.
        self._moved: Counter[int] = Counter()

    def before_update(self, update: Update) -> Findings:
        self._weights = {}
        for index in update.groups.keys() & update.grads.keys():
            if update.originals[index].requires_grad:
                self._trained.add(index)
            elif index in self._trained:
                self._weights[index] = sample(update.params[index])
        return ()

    def after_update(self, update: Update) -> Findings:
        moved = Counter[int]()
        for index, grad in dense_grads(update.grads, sorted(self._weights)).items():
            values = sample(grad)
            # Zeroth-order methods freeze all parameters, and give them new gradients in each update.
            is_old = torch.equal(values, self._grads.get(index, torch.zeros_like(values)))
            self._grads[index] = values
            if is_old and not torch.equal(sample(update.params[index]), self._weights[index]):
                moved[index] = self._moved[index] + 1
        self._moved = moved
        indices = [index for index, number in moved.items() if number == _IN_A_ROW]
        if indices:
            yield Finding("frozen move", _MOVED, tuple(indices))
