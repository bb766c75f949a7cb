"""Backward passes: what each has left, until the update that it feeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from gradsurgeon.distributed import data_parallel
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _torch, measure
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.measure import Norms

# By rule and by tensor: the statistics of the contribution of a pass, or a copy if the contribution is small.
Logged = dict[str, dict[int, Tensor | tuple[Tensor, ...]]]


@dataclass(slots=True, eq=False)
class Seen:
    """Facts that hooks collected since the last pass.

    Attributes:
        logged: by rule at `backward` and by tensor, the statistics of this pass's contribution, or a copy of it.
        contributed: norms of this rank's own contributions, before an average.
        module: whether a gradient came to a module's tensor or a tag.
    """

    order: list[int] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=partial(defaultdict, int))
    logged: Logged = field(default_factory=partial(defaultdict, dict))
    contributed: dict[int, Tensor] = field(default_factory=dict)
    module: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BackwardPass:
    """One backward pass that has ended.

    Attributes:
        indices: the parameters that got a gradient.
        graph: their order, if it differs from that of ``indices``.
        seen: what hooks collected.
        held: by tensor, whether its gradient was non-zero before, if a rule needs to know.
        had: the parameters that had a gradient before.
        is_part: whether the pass still runs, and an optimizer steps inside it.
    """

    indices: tuple[int, ...]
    graph: BackwardGraph | None = None
    seen: Seen = field(default_factory=Seen)
    scale: Tensor | None = None
    averaging: Sequence[Any] = ()
    held: dict[int, Tensor] = field(default_factory=dict)
    had: AbstractSet[int] = frozenset()
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class GradientSnapshot:
    """The norms of the gradients that a backward pass left.

    Attributes:
        members: the parameters of one update that the pass feeds.
        indices: those whose norms were taken.
    """

    done: BackwardPass
    parameters: Parameters
    members: Sequence[int]
    indices: Sequence[int]
    norms: Norms

    @property
    def order(self) -> list[int]:
        got = set(self.indices).intersection(self.done.indices)
        came = chain.from_iterable(self.arrived)
        return [index for index in (*came, *self.done.indices) if index in got]

    @property
    def arrived(self) -> list[list[int]]:
        """Return all tensors of the pass in the order of their gradients, in one list where it is unknown; -1 is no parameter."""
        if self.done.graph is not None:
            return self._arrived_in(self.done.graph)
        # Only matched parameters have hooks that see the order: other parameters may have come before them.
        known = set(self.done.indices)
        others = []
        for index, param in enumerate(self.parameters.params()):
            if param is not None and param.requires_grad and index not in known:
                others.append(index)
        groups = [[index] for index in self.done.indices]
        if others:
            groups.insert(0, others)
        return groups

    def _arrived_in(self, graph: BackwardGraph) -> list[list[int]]:
        by_id = {identity: index for index, identity in enumerate(self.parameters.ids())}
        arrived = []
        for leaves in graph.groups():
            indices = [by_id.get(id(leaf), -1) for leaf in leaves]
            arrived.append(indices)
        return arrived

    @property
    def averaged(self) -> set[int]:
        """The parameters that the pass averaged over ranks."""
        averaged: set[int] = set()
        for wrapper in self.done.averaging:
            averaged |= self.averaged_by(wrapper)
        return averaged

    def averaged_by(self, wrapper: Any) -> set[int]:
        ids = data_parallel.ids_averaged_by(wrapper)
        identities = enumerate(self.parameters.ids())
        return {index for index, identity in identities if identity in ids}

    def among(self, indices: Sequence[int]) -> GradientSnapshot:
        """Return the snapshot of some of its parameters."""
        own = set(indices).intersection(self.members)
        return replace(
            self,
            members=tuple(sorted(own)),
            indices=[index for index in self.indices if index in own],
            norms=measure.among(self.norms, own),
        )

    def without_graph(self) -> GradientSnapshot:
        """Return a copy without the graph, which keeps tensors alive; with the order that a report may need."""
        order: Sequence[int] = ()
        for _, norms in self.norms:
            # Norms on a device are not read here: that would wait.
            if not _torch.is_host(norms) or not norms.isfinite().all():
                order = self.order
                break
        indices = tuple(dict.fromkeys((*order, *self.done.indices)))
        return replace(self, done=replace(self.done, indices=indices, graph=None))


class PassHistory:
    """What backward passes left, of parameters whose update has not come yet. Its counter may come later than the pass."""

    def __init__(self) -> None:
        self._snapshots: list[GradientSnapshot] = []

    def add(self, snapshot: GradientSnapshot) -> None:
        members = set(snapshot.members)
        for place, earlier in enumerate(self._snapshots):
            # A step of many micro-batches must not keep the graph of each.
            if not members.isdisjoint(earlier.members):
                self._snapshots[place] = earlier.without_graph()
        self._snapshots.append(snapshot)

    def feeding(self, counter: StepCounter) -> Sequence[GradientSnapshot]:
        """Return what the backward passes of an update left, the earliest first."""
        feeding = []
        for snapshot in self._snapshots:
            own = snapshot
            if own.members != counter.indices:
                own = own.among(counter.indices)
            if own.members:
                feeding.append(own)
        return feeding

    def forget(self, counter: StepCounter) -> None:
        """Forget the passes of an update that is over."""
        if not self._snapshots:
            return
        updated = set(counter.indices)
        waiting = []
        for snapshot in self._snapshots:
            members = tuple(sorted(set(snapshot.members) - updated))
            if members:
                waiting.append(snapshot.among(members))
        self._snapshots = waiting

    def scale(self, counter: StepCounter) -> Tensor | None:
        """Return the scale of a `GradScaler` on the gradients of an update."""
        for snapshot in self.feeding(counter):
            if snapshot.done.scale is not None:
                return snapshot.done.scale
        return None
