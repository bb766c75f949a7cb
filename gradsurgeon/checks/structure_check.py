"""Finds faults in the structure of a model, once, at the first update."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradsurgeon.checks.base import Check, Finding, Update

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


class StructureCheck(Check):
    """Looks at weights and gradients at the first update of each optimizer."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def before_update(self, update: Update) -> Iterator[Finding]:
        new = [t for t in update.tensors if t not in self._seen and _is_matrix(update.params[t])]
        if not new:
            return
        having = [t for t in new if update.params[t].grad is not None]
        self._seen.update(having)
        for units, tensors in _copies(update, having).items():
            yield Finding("copies", _COPIES.format(units=units), tuple(tensors))
        for pair in _untied(update, having):
            yield Finding("untied", _UNTIED, pair)


def _is_matrix(param: Tensor) -> bool:
    return param.dim() > 1 and param.layout == torch.strided and param.is_floating_point()


def _copies(update: Update, tensors: list[int]) -> dict[int, list[int]]:
    """Return, by number of units, the weights whose rows are equal and have equal gradients other than 0."""
    found: dict[int, list[int]] = {}
    for tensor in tensors:
        param = update.params[tensor]
        grad, weight = param.grad, param.detach()
        # An embedding has no units: equal rows are tokens that the loss treats alike.
        if len(weight) == 1 or grad is None or update.kinds.get(tensor, "").startswith("Embedding"):
            continue
        if torch.equal(weight, weight[:1].expand_as(weight)) and grad.layout == torch.strided:
            same = torch.allclose(grad, grad[:1].expand_as(grad), rtol=_ROUNDING, atol=0.0)
            if same and bool(grad.any()):
                found.setdefault(len(weight), []).append(tensor)
    return found


def _untied(update: Update, tensors: list[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of an embedding and another weight that are equal in every element."""
    embeddings = [t for t in tensors if update.kinds.get(t, "").startswith("Embedding")]
    for embedding in embeddings:
        table = update.params[embedding].detach()
        for other in tensors:
            weight = update.params[other].detach()
            if other in embeddings or weight.shape != table.shape or weight.device != table.device:
                continue
            equal = torch.equal(weight[:1], table[:1]) and torch.equal(weight, table)
            # Two tables of one constant have not been tied, and then parted.
            if equal and not torch.equal(table, table.flatten()[:1].expand_as(table)):
                yield embedding, other
