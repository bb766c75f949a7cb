"""Which parameters of a model each optimizer owns."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.model_changes import ModelChanges
from gradsurgeon.runtime.running_steps import RunningStep
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist


@dataclass(slots=True)
class Owner:
    """An optimizer that owns parameters."""

    counter: StepCounter
    handles: tuple[RemovableHandle, ...]
    indices: tuple[int, ...] = ()
    # The version of the counters after this owner has claimed its tensors.
    version: int = -1
    # Whether each step so far has cleared the gradients that it found; unknown before the first.
    clears: bool | None = None
    # Whether the hooks are to be put on again, behind those of other sessions.
    goes_last: bool = False


class Owners:
    """The optimizers that own parameters of a model, held weakly."""

    def __init__(self, context: Context, model: ModelChanges) -> None:
        self._context = context
        self._model = model
        self.by_optimizer: weakref.WeakKeyDictionary[Optimizer, Owner] = weakref.WeakKeyDictionary()
        # The parameter ids of an optimizer and of the model when their ownership was last compared. All of these
        # parameters are alive at a comparison, so no id stands for two of them.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[int]]] = (
            weakref.WeakKeyDictionary()
        )

    def is_known(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        """Return whether optimizer and model have the parameters that they had at the last comparison."""
        ids = (list(map(id, params)), self._context.parameters.ids())
        return self._known.get(optimizer) == ids

    def note(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._known[optimizer] = list(map(id, params)), self._context.parameters.ids()

    def indices_of(self, params: Sequence[Tensor]) -> tuple[int, ...]:
        """Return which parameters of the model are among those of an optimizer."""
        if any(_dist.is_flattened(param) for param in params):
            self._model.check()
        indices = self._context.parameters.owned(params)
        if len(indices) < len(params):
            # The others belong to another model, or to this model under unknown names.
            self._model.compare()
            self._model.rearm()
            indices = self._context.parameters.owned(params)
        return tuple(indices)

    def claim(self, owner: Owner) -> None:
        """Give the tensors of an optimizer back to its counter if another counter has claimed them since."""
        counters = self._context.counters
        if owner.version != counters.version:
            counters.claim(owner.indices, owner.counter)
            owner.version = counters.version

    def let_go(self, optimizer: Optimizer | None) -> None:
        """Take the hooks off an optimizer, if it owns parameters."""
        if optimizer is None or optimizer not in self.by_optimizer:
            return
        for handle in self.by_optimizer.pop(optimizer).handles:
            handle.remove()

    def is_part_of_any(self, owner: Owner, outer_steps: Iterable[RunningStep]) -> bool:
        """Return whether a step is one with an outer step, as by `super().step()`, or in a wrapper."""
        for outer in outer_steps:
            optimizer = outer.optimizer()
            around = None
            if optimizer is not None:
                around = self.by_optimizer.get(optimizer)
            if around is owner:
                return True
            if around is not None and outer.judged and set(owner.indices) <= set(around.indices):
                return True
        return False
