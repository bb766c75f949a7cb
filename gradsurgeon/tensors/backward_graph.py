"""In which order a backward pass produced its gradients, told afterwards by its graph.

A hook on every parameter would tell it as it happens, at the price of a call of Python for each of them
in every pass. The graph tells it as well, and is asked only where somebody needs to know: for the report
of a trap, and for what a pass reaches where several threads train.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradsurgeon import _torch

# A node, or a leaf that a pass begins at: to ask for its node takes longer than it is worth.
Root = Node | Tensor

# Autograd accumulates a gradient as soon as it is there.
_AT_ONCE = 2**64
_SAVED = "_saved_"


NO_GRAPH = -2


@dataclass(frozen=True, slots=True, eq=False)
class LossNode:
    """A node between the outputs of a model and its loss.

    Attributes:
        name: of the node.
        saved: what it keeps for the backward pass, which releases it there: tensors and numbers, by name.
        made_of: by argument the place of the node that made it, -1 for an output of the model, or a leaf, and
            `NO_GRAPH` for what has none.
    """

    name: str
    saved: dict[str, Any]
    made_of: list[int]


# By type of node. To ask a node for its attributes takes longer than to read them.
_saved_names: dict[type, list[str]] = {}


def _saved(node: Any) -> dict[str, Any]:
    kind = type(node)
    if kind not in _saved_names:
        _saved_names[kind] = [name for name in dir(node) if name.startswith(_SAVED)]
    found = {}
    for name in _saved_names[kind]:
        # One that the script has written into since is refused, as the backward pass will be.
        with suppress(RuntimeError):
            found[name.removeprefix(_SAVED)] = getattr(node, name)
    return found


@dataclass(slots=True, eq=False)
class BackwardGraph:
    """The graph of one backward pass, without the tensors that it has released.

    Attributes:
        roots: where the pass began.
        inner: the roots of passes that ran inside of it, by the node that ran them: reentrant checkpointing
            runs one for each of its regions.
        loss: where it began, without its graph, if that is one number.
    """

    roots: Sequence[Root]
    inner: dict[Any, list[Sequence[Root]]] = field(default_factory=dict)
    loss: Tensor | None = None

    def nodes_after(self, number: int, most: int) -> list[LossNode]:
        """Return the nodes that were made after the one with a number, the first made first.

        None where there are more than ``most``: that is no loss, but another part of the model.
        """
        pending: list[Any] = [root for root in self.roots if not isinstance(root, Tensor)]
        met: dict[Any, int] = {}
        while pending:
            node = pending.pop()
            made = node._sequence_nr()  # noqa: SLF001 # no public name
            if node in met or made <= number or _is_leaf(node):
                continue
            met[node] = made
            if len(met) > most:
                return []
            pending += [following for following, _ in node.next_functions if following is not None]
        order = sorted(met, key=met.__getitem__)
        place = {node: position for position, node in enumerate(order)}
        return [
            LossNode(
                node.name(),
                _saved(node),
                [
                    NO_GRAPH if other is None else place.get(other, -1)
                    for other, _ in node.next_functions
                ],
            )
            for node in order
        ]

    def leaves(self) -> Iterator[Tensor]:
        """Yield the leaves in the order in which their gradients were accumulated.

        The engine takes the node that was made last among those whose gradient is complete, on each device
        for itself; between leaves of one node the order means nothing.
        """
        return (leaf for leaf in self._visited() if leaf is not None)

    def reaches(self, leaves: Collection[int]) -> bool:
        """Tell whether a pass through the graph reaches any of some leaves, by their ids.

        It stops at the first: parameters lie near the end of a model as well as near its beginning.
        """
        return any(_is_leaf(node) and id(node.variable) in leaves for node in self.nodes())

    def nodes(self) -> Iterator[Any]:
        """Yield each node that a pass through the graph runs, in no order."""
        pending: list[Any] = list(map(_torch.node_of, self.roots))
        met = {*pending, None}
        while pending:
            node = pending.pop()
            yield node
            within = [_torch.node_of(root) for roots in self.inner.get(node, ()) for root in roots]
            new = {*within, *(following for following, _ in node.next_functions)} - met
            met |= new
            pending += new

    def groups(self) -> Iterator[list[Tensor]]:
        """Yield the leaves in the same order, those of one node together: compiled code is one node."""
        # Leaves come right after the node that they belong to.
        for is_node, run in groupby(self._visited(), lambda leaf: leaf is None):
            if not is_node:
                yield [leaf for leaf in run if leaf is not None]

    def _visited(self) -> Iterator[Tensor | None]:
        """Yield the leaves, and ``None`` for each other node, in the order in which the engine takes them."""
        nodes = list(dict.fromkeys(map(_torch.node_of, self.roots)))
        missing = _users(nodes)
        moment = count()
        ready: list[tuple[int, int, Any]] = []

        def put(node: Any) -> None:
            made = _AT_ONCE if _is_leaf(node) else node._sequence_nr()  # noqa: SLF001 # its priority
            heapq.heappush(ready, (-made, next(moment), node))

        for node in nodes:
            if not missing[node]:
                put(node)
        while ready:
            node = heapq.heappop(ready)[2]
            yield node.variable if _is_leaf(node) else None
            for inner in self.inner.get(node, ()):
                yield from BackwardGraph(inner, self.inner)._visited()  # noqa: SLF001 # of its kind
            for following, _ in node.next_functions:
                if following is not None:
                    missing[following] -= 1
                    if not missing[following]:
                        put(following)


def _users(nodes: Sequence[Node]) -> Counter[Any]:
    """Return for each node that can be reached how many edges lead to it."""
    users: Counter[Any] = Counter()
    met, pending = set(nodes), list(nodes)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None:
                users[node] += 1
                if node not in met:
                    met.add(node)
                    pending.append(node)
    return users


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def roots_of(outputs: Sequence[Tensor | GradientEdge]) -> tuple[Root, ...]:
    """Return where a backward pass from tensors, or from edges of the graph, begins."""
    roots = (
        output.node if isinstance(output, GradientEdge) else output.grad_fn or output
        for output in outputs
    )
    return tuple(root for root in roots if not isinstance(root, Tensor) or root.requires_grad)
