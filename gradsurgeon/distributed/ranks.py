"""The ranks that train one model together, and what they tell each other."""

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import GradSurgeonError, NonFiniteGradientError, TrapError
from gradsurgeon.tensors import _dist

# The severity for a step: all ranks follow the worst.
FINE, OVERFLOWED, SKIP, RAISE = range(4)


@dataclass(frozen=True, slots=True)
class StopReason:
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


class Ranks:
    """The ranks that reduce or shard the gradients of one model; in one process there are no parameters to ask for.

    Process groups are never kept: a group that outlives its destruction by the script crashes the process at exit.
    """

    def __init__(self, params: Callable[[], Sequence[Tensor | None]] = tuple) -> None:
        self.are_several = params is not tuple
        self._params = params
        self._known = not self.are_several
        # The indices of the parameters inside each `DistributedDataParallel`.
        self._wrappers: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
        # The indices of the parameters on each mesh.
        self._meshes: list[list[int]] = []

    def refuse_uneven(self) -> None:
        for wrapper, _ in self._live():
            if wrapper._join_config.enable:  # noqa: SLF001 # there is no public name
                raise GradSurgeonError(
                    "the model trains under `Join`, where ranks take different numbers of steps and cannot "
                    "agree on any: give every rank the same number of batches (`drop_last`, "
                    "`DistributedSampler`), or train without rules"
                )

    def wrappers(self) -> list[Any]:
        return [wrapper for wrapper, _ in self._live()]

    def inside(self, wrapper: Any) -> frozenset[int]:
        """Return the indices of the parameters inside a wrapper that `wrappers` has returned."""
        return self._wrappers[wrapper]

    def look_again(self) -> None:
        self._known = not self.are_several

    def _live(self) -> list[tuple[Any, frozenset[int]]]:
        if not self.are_several:
            return []
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

    def shard_groups(self, param_indices: Sequence[int]) -> _dist.Groups:
        self._search_once()
        wanted = set(param_indices) if self._meshes else set()
        groups: list[Any] = []
        for indices in self._meshes:
            first = next((index for index in indices if index in wanted), None)
            if first is not None and (param := self._params()[first]) is not None:
                groups += _dist.mesh_groups(param)
        return tuple(dict.fromkeys(groups))

    def groups_of(self, wrappers: Sequence[Any], indices: Sequence[int]) -> _dist.Groups:
        # A parameter inside a wrapper counts, even if the wrapper was told to ignore it.
        having = self.wrappers_of(indices) if wrappers else ()
        return tuple(dict.fromkeys(one.process_group for one in having if one in wrappers))

    def wrappers_of(self, indices: Sequence[int]) -> list[Any]:
        return [wrapper for wrapper, held in self._live() if not held.isdisjoint(indices)]

    def averaging(
        self, indices: Sequence[int], leaves: Collection[int]
    ) -> tuple[_dist.Groups, frozenset[int]]:
        groups: dict[Any, set[int]] = {}
        for wrapper in self.wrappers_of(indices):
            held = self._params()
            averaged = data_parallel.averaged(wrapper, leaves)
            if ids := averaged.intersection(id(held[index]) for index in indices):
                groups.setdefault(wrapper.process_group, set()).update(ids)
        for group, params in groups.items():
            return (group,), frozenset(params)
        return (), frozenset()

    def shapes(self, groups: _dist.Groups) -> list[tuple[int, ...]]:
        # Shapes are the same on all ranks. Names may differ, because each rank can have its own experts.
        params = self._params()
        shared: list[Tensor] = []
        for wrapper in self.wrappers():
            if wrapper.process_group in groups:
                shared += wrapper.parameters()
        for param in (params[index] for indices in self._meshes for index in indices):
            if param is not None and not set(groups).isdisjoint(_dist.mesh_groups(param)):
                shared.append(param)
        return [tuple(param.shape) for param in shared]

    def _reducing(self) -> list[Any]:
        # `no_sync` turns the flag off.
        return [one for one in self.wrappers() if one.require_backward_grad_sync]

    @property
    def is_reducing(self) -> bool:
        return bool(self._reducing())

    def averaged(self) -> frozenset[int]:
        params = (param for one in self._reducing() for param in data_parallel.averaged_by(one))
        return frozenset(map(id, params))

    def own(self, indices: Collection[int]) -> list[int]:
        averaged = self.averaged()
        params = self._params()
        return [
            index
            for index in (indices if self.are_several else ())
            if (param := params[index]) is not None
            and param.requires_grad
            and id(param) not in averaged
            and not _dist.is_divided(param)
        ]


def largest(groups: _dist.Groups) -> _dist.Groups:
    if len(groups) < 2:  # noqa: PLR2004 # nearly always
        return groups
    found: dict[Any, frozenset[int]] = {}
    for group in sorted(groups, key=lambda one: -len(_dist.members(one))):
        ranks = frozenset(_dist.members(group))
        if not any(ranks <= other for other in found.values()):
            found[group] = ranks
    return tuple(group for group in groups if group in found)
