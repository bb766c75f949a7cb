"""The ranks that train one model together, and what they tell each other."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import GradSurgeonError, NonFiniteGradientError, TrapError
from gradsurgeon.tensors import _dist

# The severity for a step: all ranks follow the worst.
FINE = 0
OVERFLOWED = 1
SKIP = 2
RAISE = 3


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why an update does not take place, for ranks that have seen nothing as well."""

    step: int
    rank: int
    rule: str
    name: str
    text: str
    diagnosis: Diagnosis | None = None
    kind: type[TrapError] = NonFiniteGradientError
    # Whether the optimizer touches nothing; else the step raises.
    skips: bool = False

    def error(self) -> TrapError:
        bundle = getattr(self.diagnosis, "bundle", "") or None
        return self.kind(
            self.text,
            rule=self.rule,
            step=self.step,
            rank=self.rank,
            name=self.name,
            bundle=bundle,
            diagnosis=self.diagnosis,
        )


class Ranks:
    """The ranks that reduce or shard the gradients of one model; in one process there are no parameters to ask for.

    Process groups are never kept: a group that outlives its destruction by the script crashes the process at exit.
    """

    def __init__(
        self,
        params: Callable[[], Sequence[Tensor | None]] = tuple,
        groups_of: Callable[[Tensor], _dist.Groups] = _dist.mesh_groups,
    ) -> None:
        self.are_several = params is not tuple
        self._params = params
        self._groups_dividing = groups_of
        self._known = False
        # The indices of the parameters inside each `DistributedDataParallel`.
        self._wrappers = weakref.WeakKeyDictionary[Any, frozenset[int]]()
        # The indices of the parameters on each mesh.
        self._meshes: list[list[int]] = []

    def refuse_uneven(self) -> None:
        for wrapper in self.wrappers():
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
        self._known = False

    def _live(self) -> list[tuple[Any, frozenset[int]]]:
        if not self.are_several:
            return []
        self._search_once()
        for wrapper in data_parallel.known():
            if wrapper not in self._wrappers:
                inside = data_parallel.ids_of(wrapper.parameters())
                params = enumerate(self._params())
                indices = [index for index, param in params if id(param) in inside]
                self._wrappers[wrapper] = frozenset(indices)
        wrappers = [(wrapper, indices) for wrapper, indices in self._wrappers.items() if indices]
        return sorted(wrappers, key=lambda pair: min(pair[1]))

    def _search_once(self) -> None:
        if self._known or not self.are_several:
            return
        self._known = True
        params = self._params()
        # Later wrappers are noticed on their first call.
        data_parallel.find([param for param in params if param is not None])
        meshes = defaultdict(list)
        for index, param in enumerate(params):
            if param is None:
                continue
            groups = self._groups_dividing(param)
            if groups:
                meshes[groups].append(index)
        self._meshes = list(meshes.values())

    def shard_groups(self, param_indices: Sequence[int]) -> _dist.Groups:
        self._search_once()
        groups = dict[Any, None]()
        for indices in self._meshes:
            held = set(indices).intersection(param_indices)
            param = self._params()[min(held)] if held else None
            if param is not None:
                groups |= dict.fromkeys(self._groups_dividing(param))
        return tuple(groups)

    def groups_of(self, wrappers: Sequence[Any], indices: Sequence[int]) -> _dist.Groups:
        # A parameter inside a wrapper counts, even if the wrapper was told to ignore it.
        held = [wrapper for wrapper in self.wrappers_of(indices) if wrapper in wrappers]
        return tuple(dict.fromkeys([wrapper.process_group for wrapper in held]))

    def wrappers_of(self, indices: Sequence[int]) -> list[Any]:
        return [wrapper for wrapper, held in self._live() if not held.isdisjoint(indices)]

    def averaging(
        self, indices: Sequence[int], leaves: Collection[int]
    ) -> tuple[_dist.Groups, frozenset[int]]:
        """Return the first group that averages some parameters in a pass, with the ids of these parameters."""
        ids_of = defaultdict[Any, set[int]](set)
        for wrapper in self.wrappers_of(indices):
            params = self._params()
            wanted = [id(params[index]) for index in indices]
            ids = data_parallel.averaged(wrapper, leaves).intersection(wanted)
            if ids:
                ids_of[wrapper.process_group] |= ids
        if not ids_of:
            return (), frozenset()
        group = next(iter(ids_of))
        return (group,), frozenset(ids_of[group])

    def shapes(self, groups: _dist.Groups) -> list[tuple[int, ...]]:
        # Shapes are the same on all ranks. Names may differ, because each rank can have its own experts.
        shared = []
        for wrapper in self.wrappers():
            if wrapper.process_group in groups:
                shared += wrapper.parameters()
        for param in self._params():
            if param is not None and not set(groups).isdisjoint(self._groups_dividing(param)):
                shared.append(param)
        return [tuple(param.shape) for param in shared]

    def _reducing(self) -> list[Any]:
        # `no_sync` turns the flag off.
        return [wrapper for wrapper in self.wrappers() if wrapper.require_backward_grad_sync]

    @property
    def is_reducing(self) -> bool:
        return bool(self._reducing())

    def averaged(self) -> frozenset[int]:
        """Return the ids of the parameters that the next backward pass averages."""
        params = []
        for wrapper in self._reducing():
            params += data_parallel.averaged_by(wrapper)
        return data_parallel.ids_of(params)

    def own(self, indices: Collection[int]) -> list[int]:
        """Return the parameters whose gradients no other rank shares; none in one process."""
        if not self.are_several:
            return []
        averaged = self.averaged()
        params = self._params()
        own = []
        for index in indices:
            param = params[index]
            if param is None or not param.requires_grad:
                continue
            if id(param) not in averaged and not _dist.is_divided(param):
                own.append(index)
        return own


def largest(groups: _dist.Groups) -> _dist.Groups:
    """Return the groups without those whose ranks another group contains."""
    by_ranks = dict[frozenset[int], Any]()
    for group in groups:
        by_ranks.setdefault(frozenset(_dist.members(group)), group)
    outermost = []
    for ranks, group in by_ranks.items():
        is_inside_another = any(ranks < other for other in by_ranks)
        if not is_inside_another:
            outermost.append(group)
    return tuple(outermost)
