"""The ranks that train one model together, and the information that they exchange.

Decisions by gradients that all ranks share are the same everywhere. Each rank puts its own findings to
all ranks (`votes`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import GradSurgeonError, NonFiniteGradientError, TrapError

# The severity for a step: all ranks follow the worst. A paused rank reports its pause.
PAUSED, FINE, OVERFLOWED, SKIP, RAISE = range(-1, 4)


@dataclass(frozen=True, slots=True)
class StopReason:
    """The message of one rank to the others about a step."""

    rank: int
    rule: str
    name: str
    text: str
    diagnosis: Diagnosis | None = None
    kind: type[TrapError] = NonFiniteGradientError

    def error(self, step: int) -> TrapError:
        return self.kind(
            self.text,
            rule=self.rule,
            step=step,
            rank=self.rank,
            name=self.name,
            bundle=self.diagnosis.bundle or None if self.diagnosis else None,
            diagnosis=self.diagnosis,
        )


class OneProcess:
    """The ranks of a script in one process, which shares no gradients."""

    is_reducing = False

    def refuse_uneven(self) -> None:
        """Refuse ranks that take different numbers of steps."""

    def wrappers(self) -> list[Any]:
        """Return the `DistributedDataParallel` wrappers that contain some of the parameters."""
        return [wrapper for wrapper, _ in self._live()]

    def look_again(self) -> None:
        """Search again for parameters, some of which may be sharded by now."""

    def shard_groups(self, tensors: Sequence[int]) -> _dist.Groups:  # noqa: ARG002 # `Ranks` uses it
        return ()

    def groups_of(self, wrappers: Sequence[Any], tensors: Sequence[int]) -> _dist.Groups:  # noqa: ARG002 # the same
        return ()

    def wrappers_of(self, tensors: Sequence[int]) -> list[Any]:  # noqa: ARG002 # the same
        return []

    def averaging(
        self,
        tensors: Sequence[int],  # noqa: ARG002 # the same
        leaves: Collection[int],  # noqa: ARG002 # the same
    ) -> tuple[_dist.Groups, frozenset[int]]:
        return (), frozenset()

    def shapes(self, groups: _dist.Groups) -> list[tuple[int, ...]]:  # noqa: ARG002 # the same
        return []

    def averaged(self) -> frozenset[int]:
        return frozenset()

    def own(self, tensors: Collection[int]) -> list[int]:  # noqa: ARG002 # the same
        return []


class Ranks(OneProcess):
    """The ranks that reduce or shard the gradients of one model.

    Process groups are looked up whenever they are needed and never kept: a group that outlives its
    destruction by the script crashes the process at exit.
    """

    def __init__(self, params: Callable[[], Sequence[Tensor | None]]) -> None:
        # Returns the current parameters.
        self._params = params
        self._known = False
        # The indices of the parameters inside each `DistributedDataParallel`.
        self._wrappers: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
        # The indices of the parameters on each mesh.
        self._meshes: list[list[int]] = []

    def refuse_uneven(self) -> None:
        """Refuse ranks that take different numbers of steps."""
        for wrapper, _ in self._live():
            if _dist.is_joining(wrapper):
                raise GradSurgeonError(
                    "the model trains under `Join`, where ranks take different numbers of steps and cannot "
                    "agree on any: give every rank the same number of batches (`drop_last`, "
                    "`DistributedSampler`), or train without rules"
                )

    def look_again(self) -> None:
        """Search again for parameters, some of which may be sharded by now."""
        self._known = False

    def _live(self) -> list[tuple[Any, frozenset[int]]]:
        """Return the wrappers that contain some of the parameters, in the same order on all ranks."""
        self._search_once()
        for wrapper in data_parallel.known():
            if wrapper not in self._wrappers:
                inside = {id(param) for param in wrapper.parameters()}
                params = enumerate(self._params())
                self._wrappers[wrapper] = frozenset(i for i, param in params if id(param) in inside)
        having = [(wrapper, indices) for wrapper, indices in self._wrappers.items() if indices]
        return sorted(having, key=lambda pair: min(pair[1]))

    def _search_once(self) -> None:
        if self._known:
            return
        self._known = True
        params = {index: param for index, param in enumerate(self._params()) if param is not None}
        # Later wrappers are noticed on their first call.
        data_parallel.find(params.values())
        meshes: dict[_dist.Groups, list[int]] = {}
        for index, param in params.items():
            if groups := _dist.mesh_groups(param):
                meshes.setdefault(groups, []).append(index)
        self._meshes = list(meshes.values())

    def shard_groups(self, tensors: Sequence[int]) -> _dist.Groups:
        self._search_once()
        wanted = set(tensors) if self._meshes else set()
        groups: list[Any] = []
        for indices in self._meshes:
            first = next((index for index in indices if index in wanted), None)
            if first is not None and (param := self._params()[first]) is not None:
                groups += _dist.mesh_groups(param)
        return tuple(dict.fromkeys(groups))

    def groups_of(self, wrappers: Sequence[Any], tensors: Sequence[int]) -> _dist.Groups:
        """Return the groups of those wrappers that contain some of the parameters."""
        # A parameter inside a wrapper counts, even if the wrapper was told to ignore it.
        having = self.wrappers_of(tensors) if wrappers else ()
        return tuple(dict.fromkeys(one.process_group for one in having if one in wrappers))

    def wrappers_of(self, tensors: Sequence[int]) -> list[Any]:
        """Return the `DistributedDataParallel` wrappers that contain some of the parameters."""
        return [wrapper for wrapper, indices in self._live() if not indices.isdisjoint(tensors)]

    def averaging(
        self, tensors: Sequence[int], leaves: Collection[int]
    ) -> tuple[_dist.Groups, frozenset[int]]:
        """Return the ranks over which a pass that begins now averages gradients, and the parameters that it averages.

        Args:
            tensors: the parameters.
            leaves: the ids of all leaves that the pass reaches.

        Returns:
            At most one group, and the ids of the parameters averaged over it.
        """
        held = self._params()
        params = {id(held[tensor]) for tensor in tensors}
        groups: dict[Any, set[int]] = {}
        for wrapper in self.wrappers_of(tensors):
            ids = params & data_parallel.averaged(wrapper, leaves)
            if ids:
                groups.setdefault(wrapper.process_group, set()).update(ids)
        if not groups:
            return (), frozenset()
        group, averaged = next(iter(groups.items()))
        return (group,), frozenset(averaged)

    def shapes(self, groups: _dist.Groups) -> list[tuple[int, ...]]:
        """Return the shapes of the parameters that the ranks of some groups average or shard."""
        # Shapes are the same on all ranks. Names may differ, because each rank can have its own experts.
        params = self._params()
        shared: list[Tensor] = []
        for wrapper, _ in self._live():
            if wrapper.process_group in groups:
                shared += wrapper.parameters()
        for param in (params[index] for indices in self._meshes for index in indices):
            if param is not None and not set(groups).isdisjoint(_dist.mesh_groups(param)):
                shared.append(param)
        return [tuple(param.shape) for param in shared]

    @property
    def is_reducing(self) -> bool:  # type: ignore[override]
        """Whether the running backward pass ends with an average over ranks, which overwrites contributions."""
        return any(_dist.reduces(wrapper) for wrapper, _ in self._live())

    def averaged(self) -> frozenset[int]:
        """Return the ids of the parameters that the running backward pass averages over ranks."""
        wrappers = [wrapper for wrapper, _ in self._live() if _dist.reduces(wrapper)]
        return frozenset(id(param) for wrapper in wrappers for param in _dist.averaged_by(wrapper))

    def own(self, tensors: Collection[int]) -> list[int]:
        """Return the tensors, among some, that each rank has for itself: neither averaged nor sharded."""
        averaged, params = self.averaged(), self._params()
        return [
            tensor
            for tensor in tensors
            if (param := params[tensor]) is not None
            and param.requires_grad
            and id(param) not in averaged
            and not _dist.is_divided(param)
        ]


def largest(groups: _dist.Groups) -> _dist.Groups:
    """Return the groups that no other group contains: a group of experts that some ranks did not use adds nothing."""
    if len(groups) < 2:  # noqa: PLR2004 # nearly always
        return groups
    ranks = {group: frozenset(_dist.members(group)) for group in groups}
    return tuple(
        group
        for place, group in enumerate(groups)
        if not any(
            ranks[group] < ranks[other] or (ranks[group] == ranks[other] and earlier < place)
            for earlier, other in enumerate(groups)
            if other is not group
        )
    )
