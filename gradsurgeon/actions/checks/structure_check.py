"""Finds faults in the structure of a model, once, at the first update."""

from collections import Counter
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Check, Finding, Update
from gradsurgeon.tensors.sampling import sample

_UNTIED = (
    "{names} are equal in every element but two tensors: they are trained apart, so they part at the first update. "
    "If they are meant to be tied, assign one to the other after loading (`model.tie_weights()`)"
)
_COPIES = (
    "all {units} units of {{names}} are copies of one another and get the same gradient, so they stay identical and "
    "the layer learns as one unit. Initialise its weights with random numbers"
)
# Two kernels may round the same sum differently.
_ROUNDING = 1e-4
_LAYERS = ("Linear", "Conv", "RNN", "LSTM", "GRU", "Attention")
# An identity, or another pattern of few numbers, is the same in two tensors that were never tied.
_DISTINCT = 16
# Units that are equal for so many updates, with gradients that differ, are no copies.
_UPDATES = 20
# After so many updates, one in a hundred is looked at for parameters that came later.
_LATER = 100


class StructureCheck(Check):
    """Looks at weights and gradients at the first updates of each parameter."""

    def __init__(self) -> None:
        self._updates: Counter[Hashable] = Counter()
        self._seen: set[int] = set()
        # Weights whose rows are equal, and the number of updates in which they were.
        self._equal: dict[int, int] = {}

    def before_update(self, update: Update) -> Iterator[Finding]:
        self._updates[update.owner] += 1
        if self._updates[update.owner] > _UPDATES and self._updates[update.owner] % _LATER:
            return
        new = [
            t
            for t in update.indices
            if t not in self._seen and t in update.grads and _is_matrix(update.params[t])
        ]
        self._seen.update(new)
        self._equal |= dict.fromkeys((t for t in new if _has_units(update, t)), 0)
        # At the first update the gradients of equal units may cancel: then rounding noise tells nothing.
        looked_at = [t for t in self._equal if t in update.params]
        copies = [t for t in looked_at if _is_copied(update.params[t], update.grads.get(t))]
        for index in looked_at:
            self._equal[index] += 1
            if (
                index in copies
                or self._equal[index] > _UPDATES
                or not _rows_equal(update.params[index])
            ):
                del self._equal[index]
        for units in sorted({len(update.params[t]) for t in copies}):
            indices = tuple(t for t in copies if len(update.params[t]) == units)
            yield Finding("copies", _COPIES.format(units=units), indices)
        for pair in _untied(update, new) if new and not update.model.is_configured_untied() else ():
            yield Finding("untied", _UNTIED, pair)


def _is_matrix(param: Tensor) -> bool:
    return param.dim() > 1 and param.layout == torch.strided and param.is_floating_point()


def _has_units(update: Update, index: int) -> bool:
    # An embedding has no units: equal rows are tokens that the loss treats alike.
    # A matrix of no layer, such as a field or a position code, may have equal rows for good reason.
    kind = update.model.kinds.get(index, "")
    param = update.params[index]
    return len(param) > 1 and any(word in kind for word in _LAYERS) and _rows_equal(param)


def _rows_equal(param: Tensor) -> bool:
    weight = param.detach()
    # The first two rows answer nearly always.
    return torch.equal(weight[0], weight[1]) and torch.equal(weight, weight[:1].expand_as(weight))


def _is_copied(param: Tensor, grad: Tensor | None) -> bool:
    if grad is None or grad.layout != torch.strided or not _rows_equal(param):
        return False
    same = torch.allclose(grad, grad[:1].expand_as(grad), rtol=_ROUNDING, atol=0.0)
    return same and bool(grad.any())


def _untied(update: Update, indices: list[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of an embedding and another weight that are equal in every element."""
    embeddings = [t for t in indices if update.model.kinds.get(t, "").startswith("Embedding")]
    for embedding in embeddings:
        table = update.params[embedding].detach()
        for other in indices:
            weight = update.params[other].detach()
            if other in embeddings or weight.shape != table.shape or weight.device != table.device:
                continue
            equal = torch.equal(weight[:1], table[:1]) and torch.equal(weight, table)
            if equal and len(torch.unique(sample(table))) >= _DISTINCT:
                yield embedding, other
