"""Finds the line that made an operation of a loss: PyTorch notes lines until the next backward pass begins."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gradsurgeon.common.diagnosis import Line
from gradsurgeon.forensics.operations import lines_of_node
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.backward_graph import OLDER, BackwardGraph, LossNode, PassKey

# Gets the lines, and the name of the node whose derivative made the operation, empty if the script made it.
TellLines = Callable[[tuple[Line, ...], str], None]
# A pass of another model may come first.
_MOST_PASSES = 32


class _NotedLines:
    """The anomaly mode of the process, in which PyTorch notes the line of each node; off when the last user leaves it."""

    def __init__(self) -> None:
        self._users: set[object] = set()
        # This mode, not the script's own, notes the lines.
        self.is_set = False
        # The mode is one for all threads.
        self._lock = Lock()

    def enter(self, user: object) -> None:
        with self._lock:
            self._users.add(user)
            # A script that has set the mode gets the lines noted already.
            if not torch.is_anomaly_enabled():
                torch.set_anomaly_enabled(True, check_nan=False)
                self.is_set = True

    def leave(self, user: object) -> None:
        """Forget a user. Where the script has set its own mode, that stays, and ours is restored at its end."""
        with self._lock:
            self._users.discard(user)
            if self.is_set and not self._users and not torch.is_anomaly_check_nan_enabled():
                torch.set_anomaly_enabled(False)
                self.is_set = False


noted_lines = _NotedLines()


@dataclass(slots=True, eq=False)
class _Awaited:
    """An operation by its place in the graph of a pass; ``nodes`` has name and sources, oldest first."""

    nodes: Sequence[tuple[str, Sequence[int]]]
    place: int
    pass_key: PassKey
    tell: TellLines
    # From the operation to the root, if it is before `OLDER`.
    distance: int
    # The passes that it was looked for in.
    passes: int = 0

    def node_in(self, root: Any) -> Any:
        """Return the node at the place in the graph of another pass, ``None`` if that has other operations."""
        met = {len(self.nodes) - 1: root}
        # Operations before it count, too: one more of its kind would take its place.
        for place in range(len(self.nodes) - 1, -1, -1):
            name, sources = self.nodes[place]
            node: Any = met.get(place)
            if name == OLDER:
                break
            if node is None or node.name() != name or len(node.next_functions) != len(sources):
                return None
            for source, (following, _) in zip(sources, node.next_functions, strict=True):
                if source >= 0:
                    met.setdefault(source, following)
        if self.place in met:
            return met[self.place]
        return self._older_node_in(root)

    def _older_node_in(self, root: Any) -> Any:
        number = root._sequence_nr() - self.distance  # noqa: SLF001 # no public name
        name, _ = self.nodes[self.place]
        for node in BackwardGraph([root]).nodes():
            if node._sequence_nr() == number and node.name() == name:  # noqa: SLF001 # as above
                return node
        return None


class LossLine:
    """Waits for the next pass through the operations of a loss, to learn the line of one of them."""

    def __init__(self) -> None:
        self._awaited: list[_Awaited] = []
        self._begun: Counter[PassKey] = Counter()
        # The key of the last pass.
        self.pass_key: PassKey = ()

    def wait_for(
        self, nodes: Sequence[LossNode], place: int, pass_key: PassKey, tell: TellLines
    ) -> None:
        """Call a function with the line of a node, if a pass with the same key has the same operations."""
        shape = [(node.name, node.made_of) for node in nodes]
        self._awaited.append(_Awaited(shape, place, pass_key, tell, nodes[place].distance))
        noted_lines.enter(self)

    def look(self, graph: BackwardGraph) -> None:
        """Look for the operation in the graph of a pass that begins. Its forward pass may have begun before the wait."""
        root = None
        names: PassKey = ()
        # No line is looked up from several roots, and a pass may begin at thousands of them.
        if len(graph.roots) == 1:
            root = _torch.node_of(graph.roots[0])
            sources = [source.name() for source, _ in root.next_functions if source is not None]
            names = (root.name(), *sources)
        self._begun[names] += 1
        self.pass_key = (*names, str(self._begun[names]))
        for awaited in tuple(self._awaited):
            self._look_for(awaited, root)
        if noted_lines.is_set and not self._awaited:
            noted_lines.leave(self)

    def _look_for(self, awaited: _Awaited, root: Any) -> None:
        awaited.passes += 1
        node = None
        lines: tuple[Line, ...] = ()
        differentiated = ""
        # Another loss may have the same operations at another line.
        if awaited.pass_key in ((), self.pass_key):
            node = awaited.node_in(root)
        if node is not None:
            awaited.pass_key = self.pass_key
            lines = lines_of_node(node)
            parent = node.metadata.get("parent_")
            # The script has no line for the derivative of an operation of PyTorch, as in a gradient penalty.
            if parent is not None and not isinstance(parent, BackwardCFunction):
                differentiated = parent.name()
                lines = lines_of_node(parent)
        is_other = node is None and awaited.pass_key == self.pass_key
        if lines or is_other or awaited.passes == _MOST_PASSES:
            self._awaited.remove(awaited)
        if lines:
            awaited.tell(lines, differentiated)

    def updated(self) -> None:
        """Count passes anew. A script may have had its own mode on while a pass began."""
        self._begun.clear()
        if noted_lines.is_set and not self._awaited:
            noted_lines.leave(self)

    def close(self) -> None:
        self._awaited.clear()
        noted_lines.leave(self)
