"""Tells which of several models in one backward pass a finding on its graph belongs to, and which models are alike."""

import weakref
from collections.abc import Iterator

from torch import nn

from gradsurgeon.actions.checks.base import Pass, param_ids
from gradsurgeon.common import _live

# Maps each model to the texts that its check has told.
_told: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def is_elsewhere(text: str, starting: Pass) -> bool:
    """Tell whether a text belongs to another model: one that has told it and is in this pass too, or is in it alone."""
    graph = starting.graph
    root = starting.model.root()
    if graph is None or root is None:
        return False
    for other, texts in [*_told.items()]:
        if other is not root and text in texts and graph.reaches(param_ids(other)):
            return True
    modules = [] if graph.reaches(param_ids(root)) else _live.instances(nn.Module)
    # Shards may be no leaves of the graph: then no module shows its parameters there.
    for module in modules:
        if graph.reaches(param_ids(module)):
            return True
    _told.setdefault(root, set()).add(text)
    return False


def has_told(words: str, root: nn.Module | None) -> bool:
    """Tell whether a text with some words was told of a model."""
    return root is not None and any(words in text for text in _told.get(root, ()))


def twins(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the other models of the same class with parameters of the same shapes."""
    shapes = [param.shape for param in root.parameters()]
    for other in _live.instances(type(root)):
        if other is not root and [param.shape for param in other.parameters()] == shapes:
            yield other
