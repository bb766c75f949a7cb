"""In which order a backward pass produced its gradients, told afterwards by its graph.

A hook on every parameter would tell it as it happens, at the price of a call of Python for each of them
in every pass. The graph tells it as well, and is asked only where somebody needs to know: for the report
of a trap, and for what a pass reaches where several threads train.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradsurgeon import _torch

# A node, or a leaf that a pass begins at: to ask for its node takes longer than it is worth.
Root = Node | Tensor

# Autograd accumulates a gradient as soon as it is there.
_AT_ONCE = 2**64


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

    def nodes_after(self, number: int) -> list[str]:
        """Return the names of the nodes that were made after the one with a number, the first made first."""
        pending, met = list(map(_torch.node_of, self.roots)), {}
        while pending:
            node: Any = pending.pop()
            made = node._sequence_nr()  # noqa: SLF001 # no public name
            if node in met or made <= number or _is_leaf(node):
                continue
            met[node] = made
            pending += [following for following, _ in node.next_functions if following is not None]
        return [node.name() for node in sorted(met, key=met.__getitem__)]

    def leaves(self) -> Iterator[Tensor]:
        """Yield the leaves in the order in which their gradients were accumulated.

        The engine takes the node that was made last among those whose gradient is complete, on each device
        for itself; between leaves of one node the order means nothing.
        """
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
            for inner in self.inner.get(node, ()):
                yield from BackwardGraph(inner, self.inner).leaves()
            if _is_leaf(node):
                yield node.variable
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
