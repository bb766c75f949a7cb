"""Finds faults in the structure of a model, once, at the first update."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Check, Finding, Findings, Pass, Update
from gradsurgeon.actions.checks.idle_settings import idle_attributes, idle_loads
from gradsurgeon.actions.checks.loss_graph import LossGraph
from gradsurgeon.actions.checks.structure_facts import StructureFacts
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
# After so many updates, one in a hundred is looked at for parameters that came later.
_UPDATES = 20
_LATER = 100


class StructureCheck(Check):
    """Looks at weights and gradients at the first updates of each parameter."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        # Weights whose rows are equal, and have been in each update that was looked at.
        self._equal: set[int] = set()
        self._loss = LossGraph()
        self._facts = StructureFacts()

    def rests(self, method: str) -> bool:
        return method == "before_pass" and self._loss.is_over and self._facts.is_over

    def before_pass(self, starting: Pass) -> Findings:
        yield from self._loss.before_pass(starting)
        yield from self._facts.before_pass(starting)

    def before_update(self, update: Update) -> Findings:
        yield from self._loss.before_update(update)
        root = update.model.root()
        if root is not None:
            yield from idle_loads(root, has_updated=bool(self._seen))
        if self._seen and update.step > _UPDATES and update.step % _LATER:
            return
        new = []
        for index in update.indices:
            if index in update.grads and index not in self._seen:
                param = update.params[index]
                if param.dim() > 1 and param.layout == torch.strided and param.is_floating_point():
                    new.append(index)
        self._seen.update(new)
        self._equal.update(index for index in new if _is_layer(update, index))
        for units, indices in self._copies(update).items():
            yield Finding("copies", _COPIES.format(units=units), tuple(indices))
        for pair in _untied(update, new):
            yield Finding("untied", _UNTIED, pair)
        if root is not None:
            yield from idle_attributes(root, update)

    def _copies(self, update: Update) -> dict[int, list[int]]:
        """Return, by number of units, the weights whose units are copies; forget those, and weights whose rows differ."""
        copies: dict[int, list[int]] = {}
        for index in sorted(self._equal):
            param = update.params.get(index)
            if param is None or not _rows_equal(param):
                self._equal.discard(index)
            elif _has_equal_rows(update.grads.get(index)):
                self._equal.discard(index)
                copies.setdefault(len(param), []).append(index)
        return copies


def _is_layer(update: Update, index: int) -> bool:
    # An embedding has no units: equal rows are tokens that the loss treats alike.
    # A matrix of no layer, such as a field or a position code, may have equal rows for good reason.
    kind = update.model.kinds.get(index, "")
    return any(word in kind for word in _LAYERS)


def _rows_equal(param: Tensor) -> bool:
    if len(param) <= 1:
        return False
    weight = param.detach()
    # The first two rows answer nearly always.
    return torch.equal(weight[0], weight[1]) and torch.equal(weight, weight[:1].expand_as(weight))


def _has_equal_rows(grad: Tensor | None) -> bool:
    """Tell whether a gradient has equal rows. A gradient of 0 tells nothing: gradients of equal units may cancel."""
    if grad is None or grad.layout != torch.strided:
        return False
    same = torch.allclose(grad, grad[:1].expand_as(grad), rtol=_ROUNDING, atol=0.0)
    return same and bool(grad.any())


def _untied(update: Update, indices: list[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of an embedding and another weight that are equal in every element."""
    kinds = update.model.kinds
    embeddings = [index for index in indices if kinds.get(index, "").startswith("Embedding")]
    root = update.model.root()
    if not embeddings or root is None:
        return
    # Models of Hugging Face have a configuration, which may say that they are not meant to be tied.
    ties = []
    for module in root.modules():
        config = getattr(module, "config", None)
        ties.append(getattr(config, "tie_word_embeddings", None))
    if False in ties:
        return
    others = [index for index in indices if index not in embeddings]
    for embedding in embeddings:
        table = update.params[embedding].detach()
        for other in others:
            weight = update.params[other].detach()
            # The first rows answer nearly always.
            if weight.device != table.device or not torch.equal(weight[:1], table[:1]):
                continue
            if torch.equal(weight, table) and len(torch.unique(sample(table))) >= _DISTINCT:
                yield embedding, other
