"""The order in which a backward pass produced its gradients, read on demand from its graph instead of by hooks."""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.readable import readable

# A node, or a leaf at which a pass begins: getting the node of a leaf takes longer than using it.
Root = Node | Tensor

# Autograd accumulates a gradient as soon as it has come.
_AT_ONCE = 2**64
_SAVED = "_saved_"


NO_GRAPH = -2


@dataclass(frozen=True, slots=True, eq=False)
class LossNode:
    """A node between a model's outputs and its loss.

    Attributes:
        saved: what it keeps for the backward pass, by name; the pass releases it.
        made_of: per argument, the place of its node; -1 for an output of the model or a leaf, `NO_GRAPH` without a graph.
    """

    name: str
    saved: dict[str, Any]
    made_of: list[int]

    def readable_values(self) -> dict[str, Any]:
        """Return the saved values without tensors that cannot be read any more, such as parameters that FSDP has freed."""
        values = {}
        for name, value in self.saved.items():
            is_freed = isinstance(value, Tensor) and readable(value) is None
            if not is_freed:
                values[name] = value
        return values


# The saved attributes by type of node, with their names. Listing the attributes takes longer than reading them.
_saved_names: dict[type, list[tuple[str, str]]] = {}


def _saved(node: Any) -> dict[str, Any]:
    kind = type(node)
    if kind not in _saved_names:
        attributes = [attribute for attribute in dir(node) if attribute.startswith(_SAVED)]
        names = [attribute.removeprefix(_SAVED) for attribute in attributes]
        _saved_names[kind] = list(zip(attributes, names, strict=True))
    values = {}
    for attribute, name in _saved_names[kind]:
        if _torch.runs_script(node, name):
            continue
        try:
            values[name] = getattr(node, attribute)
        except RuntimeError:
            # torch refuses a tensor that the script has written into since; the backward pass refuses it also.
            continue
    return values


@dataclass(slots=True, eq=False)
class BackwardGraph:
    """The graph of one backward pass.

    Attributes:
        inner: the roots of passes inside it, by the node that ran them.
        losses: the numbers that it begins from, detached.
    """

    roots: Sequence[Root]
    inner: dict[Any, list[Sequence[Root]]] = field(default_factory=dict)
    losses: Sequence[Tensor] = ()

    @property
    def loss(self) -> Tensor | None:
        """The only number that the pass begins from."""
        if len(self.roots) == len(self.losses) == 1:
            return self.losses[0]
        return None

    @property
    def made(self) -> int:
        """The number of its oldest root: torch numbers nodes upwards."""
        numbers = [root._sequence_nr() for root in self.roots if not isinstance(root, Tensor)]  # noqa: SLF001 # no public name
        return min(numbers, default=_AT_ONCE)

    def nodes_after(self, number: int, most: int) -> list[LossNode]:
        """Return the nodes made after a node with a given number, oldest first; none if there are more than ``most``."""
        pending: list[Any] = [root for root in self.roots if not isinstance(root, Tensor)]
        met: dict[Any, int] = {}
        made_of: dict[Any, list[Any]] = {}
        while pending:
            node = pending.pop()
            if node is None or node in met:
                continue
            made = node._sequence_nr()  # noqa: SLF001 # no public name
            if made <= number or _is_leaf(node):
                continue
            met[node] = made
            if len(met) > most:
                return []
            made_of[node] = [source for source, _ in node.next_functions]
            pending += made_of[node]
        oldest_first = sorted(met, key=met.__getitem__)
        place_of: dict[Any, int] = {node: place for place, node in enumerate(oldest_first)}
        place_of[None] = NO_GRAPH
        loss_nodes = []
        for node in oldest_first:
            places = [place_of.get(source, -1) for source in made_of[node]]
            loss_nodes.append(LossNode(node.name(), _saved(node), places))
        return loss_nodes

    def leaves(self) -> Iterator[Tensor]:
        """Yield the leaves in the order in which their gradients were accumulated: the newest complete node of a device is first."""
        return (leaf for leaf in self._visited() if leaf is not None)

    def reaches(self, leaves: Collection[int]) -> bool:
        """Tell whether a pass through the graph reaches any of some leaves, by their ids; stops at the first hit."""
        return any(_is_leaf(node) and id(node.variable) in leaves for node in self.nodes())

    def nodes(self) -> Iterator[Any]:
        """Yield each node that a pass through the graph runs, in no particular order."""
        return _walked(_nodes_of(self.roots), self.inner)

    def groups(self) -> Iterator[list[Tensor]]:
        """Yield the leaves in the same order, grouped by node: compiled code is one node."""
        # Leaves come right after their node.
        leaves: list[Tensor] = []
        for leaf in self._visited():
            if leaf is not None:
                leaves.append(leaf)
            elif leaves:
                yield leaves
                leaves = []
        if leaves:
            yield leaves

    def _visited(self) -> Iterator[Tensor | None]:
        """Yield the leaves, and ``None`` for each other node, in the order in which the engine runs them."""
        nodes = list(dict.fromkeys(_nodes_of(self.roots)))
        # The number of edges that lead to each node.
        missing = Counter(_ends_of_edges(nodes))
        moment = count()
        ready: list[tuple[int, int, Any]] = []

        def put(node: Any) -> None:
            heapq.heappush(ready, (-_priority(node), next(moment), node))

        for node in nodes:
            if not missing[node]:
                put(node)
        while ready:
            _, _, node = heapq.heappop(ready)
            if _is_leaf(node):
                yield node.variable
            else:
                yield None
            for inner in self.inner.get(node, ()):
                yield from BackwardGraph(inner, self.inner)._visited()  # noqa: SLF001 # of its kind
            for following, _ in node.next_functions:
                if following is not None:
                    missing[following] -= 1
                    if not missing[following]:
                        put(following)


def _nodes_of(roots: Sequence[Root]) -> list[Node]:
    return [_torch.node_of(root) for root in roots]


def _walked(
    nodes: Sequence[Any], inner: Mapping[Any, Sequence[Sequence[Root]]] = MappingProxyType({})
) -> Iterator[Any]:
    """Yield each node that can be reached from some nodes, and from the roots of passes that ran inside of them."""
    pending = [*nodes]
    met = {*nodes, None}
    while pending:
        node = pending.pop()
        yield node
        following = {source for source, _ in node.next_functions}
        for roots in inner.get(node, ()):
            following.update(_nodes_of(roots))
        new = following - met
        met |= new
        pending += new


def _ends_of_edges(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield the node to which each edge leads, of all edges that can be reached from some nodes."""
    for node in _walked(nodes):
        for following, _ in node.next_functions:
            yield following


def _priority(node: Any) -> int:
    if _is_leaf(node):
        return _AT_ONCE
    return int(node._sequence_nr())  # noqa: SLF001 # no public name


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def roots_of(outputs: Sequence[Tensor | GradientEdge]) -> tuple[Root, ...]:
    """Return the nodes or leaves where a backward pass from tensors, or from graph edges, begins."""
    roots: list[Root] = []
    for output in outputs:
        root: Root
        if isinstance(output, GradientEdge):
            root = output.node
        elif output.grad_fn is not None:
            root = output.grad_fn
        else:
            root = output
        if not isinstance(root, Tensor) or root.requires_grad:
            roots.append(root)
    return tuple(roots)
