"""The ranks that train one model together: who they are, and what they must agree on.

A rank that stops or skips alone leaves the others waiting in their next collective. What comes from
gradients that all ranks share is the same everywhere; what one rank has seen of its own forward pass
or its own part is put to all of them, in one reduced number, outside of autograd.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.errors import GradSurgeonError


@dataclass(frozen=True, slots=True)
class Word:
    """What one rank has to say to the others about a step."""

    rank: int
    rule: str
    name: str
    text: str


class Ranks:
    """The ranks among which the gradients of one model are reduced or divided.

    Process groups are asked for whenever they are needed and never kept: one that outlives its
    destruction by the script brings the process down when it ends.

    Args:
        params: returns the parameters of the model as they are now.
    """

    def __init__(self, params: Callable[[], Sequence[Tensor | None]]) -> None:
        self._params = params
        # Each wrapper, and the places of the parameters in its care; in the same order on all ranks.
        self._wrappers: list[tuple[weakref.ref[Any], frozenset[int]]] = []
        # The places of the parameters on each mesh.
        self._meshes: list[tuple[int, ...]] = []
        self._known = False
        # Which wrappers the last backward pass reduced over; unknown before there was one.
        self._reduced: list[weakref.ref[Any]] | None = None

    def look_around(self) -> None:
        """Find out, when a backward pass begins, whether the model is trained by several ranks.

        Raises:
            GradSurgeonError: the ranks may take different numbers of steps.
        """
        self._meet()
        self._reduced = [one for one, _ in self._wrappers if _reduces(one)]
        for wrapper in self._live():
            if _dist.is_joining(wrapper):
                raise GradSurgeonError(
                    "the model trains under `Join`, where ranks run out of inputs at different steps: "
                    "they could no longer agree on a trap or on the number of a step; give every rank "
                    "the same number of batches (`drop_last`, `DistributedSampler`), or train without "
                    "rules"
                )

    def _meet(self) -> None:
        if not self._known:
            self._known = True
            if _dist.world() > 1:
                self._find()

    def _find(self) -> None:
        params = {place: one for place, one in enumerate(self._params()) if one is not None}
        found = []
        for wrapper in _dist.data_parallel(params.values()):
            inside = {id(one) for one in wrapper.parameters()}
            own = frozenset(place for place, one in params.items() if id(one) in inside)
            found.append((weakref.ref(wrapper), own))
        # They were found in no order that ranks share.
        self._wrappers = sorted(found, key=lambda one: min(one[1]))
        meshes: dict[_dist.Groups, list[int]] = {}
        for place, param in params.items():
            if groups := _dist.mesh_groups(param):
                meshes.setdefault(groups, []).append(place)
        self._meshes = [tuple(places) for places in meshes.values()]

    def _live(self) -> list[Any]:
        return [wrapper for one, _ in self._wrappers if (wrapper := one()) is not None]

    def sharing(self, tensors: Sequence[int]) -> _dist.Groups:
        """Return the groups of the meshes over which some parameters are divided."""
        self._meet()
        wanted = set(tensors) if self._meshes else set()
        params = self._params() if self._meshes else ()
        groups: dict[Any, None] = {}
        for places in self._meshes:
            first = next((place for place in places if place in wanted), None)
            if first is not None and (param := params[first]) is not None:
                groups.update(dict.fromkeys(_dist.mesh_groups(param)))
        return tuple(groups)

    def reducing(self, tensors: Sequence[int], *, any_pass: bool = False) -> _dist.Groups:
        """Return the groups over which the last backward pass has averaged gradients (DDP).

        Args:
            tensors: of the optimizer that is about to step. What is in the care of a wrapper counts,
                though it was told to leave it alone.
            any_pass: those over which a backward pass can average gradients, be it this one or not.
        """
        self._meet()
        groups: dict[Any, None] = {}
        for one, places in self._wrappers:
            now = _reduces(one) if self._reduced is None else one in self._reduced
            wrapper = one() if now or any_pass else None
            if wrapper is not None and not places.isdisjoint(tensors):
                groups[wrapper.process_group] = None
        return tuple(groups)

    def shapes(self, group: Any) -> list[tuple[int, ...]]:
        """Return the shapes of what the ranks of a group average or divide.

        They are the same on all of them, where names may differ: each rank can have experts of its own.
        """
        params = self._params()
        wrapped = [
            param
            for wrapper in self._live()
            if wrapper.process_group == group
            for param in wrapper.parameters()
        ]
        divided = [
            param
            for places in self._meshes
            for place in places
            if (param := params[place]) is not None and group in _dist.mesh_groups(param)
        ]
        return [tuple(param.shape) for param in (*wrapped, *divided)]

    @property
    def averaging(self) -> bool:
        """Whether the running backward pass ends with an average over ranks (DDP).

        What a rank contributes is gone by then: who wants to know must look before.
        """
        self._meet()
        return any(_dist.reduces(wrapper) for wrapper in self._live())

    def averaged(self) -> frozenset[int]:
        """Return the ids of the parameters that the running backward pass averages over ranks."""
        wrappers = [wrapper for wrapper in self._live() if _dist.reduces(wrapper)]
        return frozenset(id(one) for wrapper in wrappers for one in _dist.averaged_by(wrapper))


def _reduces(one: weakref.ref[Any]) -> bool:
    wrapper = one()
    return wrapper is not None and _dist.reduces(wrapper)


def who(mine: bool, groups: _dist.Groups) -> tuple[int, ...]:  # noqa: FBT001 # the only thing it is told
    """Return the ranks that say yes. A collective."""
    votes = torch.zeros(_dist.world(), dtype=torch.int64, device="cpu")
    votes[_dist.rank()] = int(mine)
    return tuple(_dist.reduce(votes, groups).nonzero().flatten().tolist())


def worst(severity: int, groups: _dist.Groups) -> tuple[int, int]:
    """Return the largest severity among all ranks, and the first rank that has it. A collective."""
    world = _dist.world()
    own = torch.tensor([severity * (world + 1) + world - _dist.rank()], device="cpu")
    found, left = divmod(int(_dist.reduce(own, groups, "max")), world + 1)
    return found, world - left


def hear(word: Word | None, source: int, groups: _dist.Groups) -> Word:
    """Return the word of rank ``source`` on all ranks. A collective."""
    said = json.dumps(asdict(word)) if word is not None else ""
    return Word(**json.loads(_dist.broadcast_text(said, source, groups)))
