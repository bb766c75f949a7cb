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
        self._wrappers: list[weakref.ref[Any]] = []
        # One parameter for every mesh that there is.
        self._samples: tuple[int, ...] = ()
        self._known = False
        self._device = torch.device("cpu")

    def look_around(self) -> None:
        """Find out, when a backward pass begins, whether the model is trained by several ranks.

        Raises:
            GradSurgeonError: the ranks may take different numbers of steps.
        """
        self._meet()
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
        params = [(place, one) for place, one in enumerate(self._params()) if one is not None]
        wrappers = _dist.data_parallel([param for _, param in params])
        self._wrappers = [weakref.ref(wrapper) for wrapper in wrappers]
        meshes: dict[_dist.Groups, int] = {}
        for place, param in params:
            if groups := _dist.mesh_groups(param):
                meshes.setdefault(groups, place)
        self._samples = tuple(meshes.values())
        if params:
            self._device = _dist.local(params[0][1]).device

    def _live(self) -> list[Any]:
        return [wrapper for one in self._wrappers if (wrapper := one()) is not None]

    def _groups(self) -> _dist.Groups:
        params = self._params() if self._samples else ()
        sharded = [param for place in self._samples if (param := params[place]) is not None]
        groups = [group for param in sharded for group in _dist.mesh_groups(param)]
        groups += [wrapper.process_group for wrapper in self._live()]
        return tuple(dict.fromkeys(groups))

    @property
    def averaging(self) -> bool:
        """Whether the running backward pass ends with an average over ranks (DDP).

        What a rank contributes is gone by then: who wants to know must look before.
        """
        self._meet()
        return any(_dist.reduces(wrapper) for wrapper in self._live())

    @property
    def filling_in(self) -> bool:
        """Whether a rank gets gradients for what it has not used itself, past all hooks (DDP)."""
        return any(_dist.fills_in(wrapper) for wrapper in self._live())

    def averaged(self) -> frozenset[int]:
        """Return the ids of the parameters that the running backward pass averages over ranks."""
        wrappers = [wrapper for wrapper in self._live() if _dist.reduces(wrapper)]
        return frozenset(id(one) for wrapper in wrappers for one in _dist.averaged_by(wrapper))

    @property
    def together(self) -> bool:
        """Whether the step is one that all ranks take together."""
        live = self._live()
        return bool(self._samples or live) and (not live or any(_dist.reduces(one) for one in live))

    def who(self, mine: bool) -> tuple[int, ...]:  # noqa: FBT001 # the only thing it is told
        """Return the ranks that say yes. A collective."""
        votes = torch.zeros(_dist.world(), dtype=torch.int64, device=self._device)
        votes[_dist.rank()] = int(mine)
        return tuple(_dist.reduce(votes, self._groups()).nonzero().flatten().tolist())

    def worst(self, severity: int) -> tuple[int, int]:
        """Return the largest severity among all ranks, and the first rank that has it.

        A collective.
        """
        world = _dist.world()
        own = torch.tensor([severity * (world + 1) + world - _dist.rank()], device=self._device)
        found, left = divmod(int(_dist.reduce(own, self._groups(), "max")), world + 1)
        return found, world - left

    def hear(self, word: Word | None, source: int) -> Word:
        """Return the word of rank ``source`` on all ranks. A collective."""
        said = json.dumps(asdict(word)) if word is not None else ""
        return Word(**json.loads(_dist.broadcast_text(said, source, self._groups())))
