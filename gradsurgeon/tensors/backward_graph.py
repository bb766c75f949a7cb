"""The order in which a backward pass produced its gradients, read on demand from its graph instead of by hooks."""

import heapq
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradsurgeon.tensors import _dist, _torch
from gradsurgeon.tensors.readable import is_readable

# A node, or a leaf at which a pass begins: getting the node of a leaf takes longer than using it.
Root = Node | Tensor

# Autograd accumulates a gradient as soon as it has come.
_AT_ONCE = 2**64
# The number of each node that accumulates the gradient of a leaf.
_LEAF = 2**64 - 1
_SAVED = "_saved_"
# Nodes between a loss as its pass gets it, and a part of it from before an earlier pass.
_NEAR = 16

# Stands for the operations of a loss before its last ones. Of those before it only a few kinds are kept.
OLDER = "..."
# Operations that make NaN or Inf of moderate numbers, or have no derivative at some, and keep what shows it.
_MAKER_NAMES = (
    "AcosBackward0 AcoshBackward0 AsinBackward0 AtanhBackward0 CtcLossBackward0 CtcLossBackward1 DivBackward0 "
    "ExpBackward0 Exp2Backward0 Expm1Backward0 LogBackward0 Log10Backward0 Log1PBackward0 Log2Backward0 LogitBackward0 "
    "NllLossBackward0 NllLoss2DBackward0 PowBackward0 PowBackward1 ReciprocalBackward0 RsqrtBackward0 SqrtBackward0 "
    "XlogyBackward0"
)
_MAKERS = frozenset(_MAKER_NAMES.split())

NO_GRAPH = -2
# Among the names of what a node keeps if some of it was not read.
UNREAD = "unread"
# Older releases of torch do not tell which saved tensors run code when they are read, so none is read.
READS_SAVED = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # noqa: SLF001 # no public name
# The names of the operations at which a pass begins, and its number among the passes of an update that begin alike.
PassKey = tuple[str, ...]


@dataclass(slots=True, eq=False)
class LossNode:
    """A node between a model's outputs and its loss.

    Attributes:
        saved: what it keeps for the backward pass, by name; the pass releases it. `UNREAD` stands for what was not read.
        made_of: per argument, the place of its node; -1 for an output of the model or a leaf, `NO_GRAPH` without a graph.
            The sources of nodes before `OLDER` are not kept: they have -1, too.
        distance: how many nodes of its thread were made from it to the first root, if it is before `OLDER`.
    """

    name: str
    saved: dict[str, Any]
    made_of: list[int]
    distance: int = 0

    def readable_values(self) -> dict[str, Any]:
        """Return the saved values without tensors that cannot be read any more, such as parameters that FSDP has freed."""
        values = {}
        for name, value in self.saved.items():
            if isinstance(value, Tensor) and not is_readable(value):
                values[UNREAD] = True
            else:
                values[name] = value
        return values

    @property
    def is_unread(self) -> bool:
        return UNREAD in self.readable_values()


# The saved attributes by type of node, with their names, and whether they are packed, as numbers are not. Listing the
# attributes takes longer than reading them.
_saved_names: dict[type, list[tuple[str, str, bool]]] = {}


def _has_hooks(packed: Any) -> bool:
    """Tell whether reading a saved tensor runs code: of the script, or a checkpointed forward pass."""
    if isinstance(packed, tuple):  # some nodes save several tensors under one name
        return any(map(_has_hooks, packed))
    return not READS_SAVED or packed.unpack_hook is not None


def _saved(node: Any) -> dict[str, Any]:
    kind = type(node)
    if kind not in _saved_names:
        attributes = dir(node)
        _saved_names[kind] = []
        for attribute in attributes:
            if attribute.startswith(_SAVED):
                is_packed = f"_raw{attribute}" in attributes
                names = (attribute, attribute.removeprefix(_SAVED), is_packed)
                _saved_names[kind].append(names)
    values = {}
    for attribute, name, is_packed in _saved_names[kind]:
        try:
            if is_packed and _has_hooks(getattr(node, f"_raw{attribute}")):
                values[UNREAD] = True
            else:
                values[name] = getattr(node, attribute)
        except RuntimeError:
            # Torch refuses a tensor that the script has written into since, and all tensors once their pass is over.
            values[UNREAD] = True
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
        return min(map(_priority, _nodes_of(self.roots)), default=_AT_ONCE)

    def began_before(self, number: int) -> bool:
        """Tell whether a node near its roots is older than a node with a given number: torch numbers nodes upwards."""
        return any(_leads_before(node, number) for node in _nodes_of(self.roots))

    def last_nodes(
        self, most: int, spans: Sequence[tuple[int, int]] = (), *, older: int = 0
    ) -> list[LossNode]:
        """Return the last nodes, oldest first; ``spans`` are the first and last numbers of nodes to stop at, as those of a model.

        If there are more, `OLDER` comes before them, and before it those of so many older ones that may make NaN.
        """
        made_of: dict[Any, Sequence[tuple[Any, int]]] = {}
        pending: list[tuple[int, int, Any]] = []
        firsts, ends = _begins_and_ends(spans)
        # Decides among nodes with equal numbers: nodes have no order.
        pushed = 0
        left = most
        following: Sequence[tuple[Any, int]] = [(root, 0) for root in self.roots]
        while True:
            for source, _ in following:
                if source is None or source in made_of or isinstance(source, Tensor):
                    continue
                made = source._sequence_nr()  # noqa: SLF001 # no public name
                if ends[bisect_right(firsts, made)] < made < _LEAF:
                    pushed += 1
                    heapq.heappush(pending, (-made, pushed, source))
            if not pending or not left:
                break
            _, _, node = heapq.heappop(pending)
            following = ()
            if node not in made_of:
                left -= 1
                following = made_of[node] = node.next_functions
        place_of: dict[Any, int] = {None: NO_GRAPH}
        loss_nodes: list[LossNode] = []
        cut = [node for _, _, node in pending if node not in made_of]
        if cut and older:
            loss_nodes = self._older_nodes(cut, older, firsts, ends)
            place_of.update(dict.fromkeys(cut, len(loss_nodes) - 1))
        # The newest node was met first.
        for node, sources in reversed(made_of.items()):
            places = [place_of.get(source, -1) for source, _ in sources]
            place_of[node] = len(loss_nodes)
            loss_nodes.append(LossNode(node.name(), _saved(node), places))
        return loss_nodes

    def _older_nodes(
        self, cut: Sequence[Any], most: int, firsts: Sequence[int], ends: Sequence[int]
    ) -> list[LossNode]:
        """Return the nodes that may make NaN among some nodes and those that lead to them, oldest first, and `OLDER`."""
        makers = []
        pending = [*cut]
        met = {*cut, None}
        while pending and len(met) < most:
            node = pending.pop()
            if type(node).__name__ in _MAKERS:
                makers.append(node)
            for source, _ in node.next_functions:
                if source not in met:
                    met.add(source)
                    made = source._sequence_nr()  # noqa: SLF001 # no public name
                    if ends[bisect_right(firsts, made)] < made < _LEAF:
                        pending.append(source)
        root = self.made
        older = []
        for node in sorted(makers, key=_priority):
            places = [NO_GRAPH if source is None else -1 for source, _ in node.next_functions]
            distance = root - _priority(node)
            older.append(LossNode(node.name(), _saved(node), places, distance))
        return [*older, LossNode(OLDER, {}, [*range(len(older))])]

    def leaves(self) -> Iterator[Tensor]:
        """Yield the leaves in the order in which their gradients were accumulated: the newest complete node of a device is first."""
        return (leaf for leaf in self._visited() if leaf is not None)

    def reaches(self, leaves: Collection[int]) -> bool:
        """Tell whether a pass through the graph reaches any of some leaves, by their ids; stops at the first hit."""
        return any(_is_leaf(node) and id(node.variable) in leaves for node in self.nodes())

    def addresses(self) -> set[int]:
        """Return where in memory the leaves of the pass, and the plain tensors that its nodes keep, begin."""
        addresses = set[int]()
        for node in self.nodes():
            tensors = [node.variable] if _is_leaf(node) else _saved(node).values()
            for tensor in tensors:
                if type(tensor) in _dist.PLAIN:
                    addresses.add(tensor.data_ptr())
        return addresses

    def nodes(self) -> Iterator[Any]:
        """Yield each node that a pass through the graph runs, in no particular order."""
        return _walked(_nodes_of(self.roots), self.inner)

    def groups(self) -> Iterator[list[Tensor]]:
        """Yield the leaves in the same order, grouped by node: compiled code is one node."""
        # Leaves come right after their node.
        for is_other, visited in groupby(self._visited(), lambda leaf: leaf is None):
            if not is_other:
                yield [leaf for leaf in visited if leaf is not None]

    def _visited(self) -> Iterator[Tensor | None]:
        """Yield the leaves, and ``None`` for each other node, in the order in which the engine runs them."""
        nodes = list(dict.fromkeys(_nodes_of(self.roots)))
        # The number of edges that lead to each node.
        missing = Counter([end for node in _walked(nodes) for end, _ in node.next_functions])
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
    return list(map(_torch.node_of, roots))


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


def _begins_and_ends(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the first numbers of spans, and the largest last number before each and up to each: one more."""
    firsts = []
    ends = [-1]
    for first, last in sorted(spans):
        firsts.append(first)
        ends.append(max(last, ends[-1]))
    return firsts, ends


def _priority(node: Any) -> int:
    if _is_leaf(node):
        return _AT_ONCE
    return int(node._sequence_nr())  # noqa: SLF001 # no public name


def _leads_before(node: Any, number: int) -> bool:
    # A script may scale or weight a loss right before its pass.
    for _ in range(_NEAR):
        if _priority(node) < number:
            return True
        sources = [source for source, _ in node.next_functions if source is not None]
        if not sources:
            return False
        node = min(sources, key=_priority)
    return False


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def label_of(node: LossNode, nodes: Sequence[LossNode]) -> str:
    """Return the name of a node; of several alike, also which one it is."""
    alike = [other for other in nodes if other.name == node.name]
    if len(alike) == 1:
        return node.name
    return f"{node.name}, number {alike.index(node) + 1} of {len(alike)}"


def operation_of(node_name: str) -> str:
    """Return the operation of a node in a graph: ``nll_loss`` for ``NllLossBackward0``."""
    operation = node_name.partition("Backward")[0]
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", operation).lower()


def roots_of(outputs: Sequence[Tensor | GradientEdge]) -> tuple[Root, ...]:
    """Return the nodes or leaves where a backward pass from tensors, or from graph edges, begins."""
    roots = []
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
