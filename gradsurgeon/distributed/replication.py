"""Which ranks hold the parameters of a session alike, and which of their gradients `DistributedDataParallel` averaged."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsurgeon.actions.checks.base import Missed, Replicas
from gradsurgeon.distributed import data_parallel
from gradsurgeon.distributed.ranks import Ranks
from gradsurgeon.tensors import _dist

# The reason why the last pass did not average, given whether a wrapper runs alone, and whether an earlier pass averaged.
_MISSED: dict[tuple[bool, bool], Missed] = {
    (True, True): "alone at last",
    (True, False): "alone",
    (False, True): "twice",
    (False, False): "bypassed",
}


@dataclass(slots=True)
class _Followed:
    """The last averaged pass of a wrapper, and whether it keeps ranks equal."""

    # The last pass that it averaged, and the number of passes through its parameters since then.
    last_pass: int = 0
    passes_since: int = 0
    # Not if it may leave ranks apart: with a communication hook, under `Join`, or after an update without it.
    is_promised: bool = True
    # Its place in the order in which those of the same ranks were met.
    number: int = -1


class Replication:
    """Follows the backward passes of a session, and names the replicas of each update.

    Args:
        names: the parameters of the session.
        ranks: returns the ranks of this process as they are known now.
        params: returns some parameters, or all; ``None`` for those that are gone.
    """

    def __init__(
        self,
        names: Sequence[str],
        ranks: Callable[[], Ranks],
        params: Callable[[Iterable[int] | None], Sequence[Tensor | None]],
    ) -> None:
        self._names = names
        self._ranks = ranks
        self._params = params
        self._passes = 0
        # Why the last pass of a parameter did not average its gradient, and the parameters that a pass averaged; both
        # since the last update.
        self._missed: dict[int, Missed] = {}
        self._averaged: set[int] = set()
        self._followed = weakref.WeakKeyDictionary[Any, _Followed]()
        # The number of wrappers met so far, by their ranks.
        self._met = Counter[tuple[int, ...]]()
        self._hashes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def passed(self, reached: Collection[int], averaging: Collection[Any]) -> None:
        """Note a backward pass, and the wrappers that averaged in it."""
        self._passes += 1
        averaged = set[int]()
        for wrapper in averaging:
            averaged |= self._averaged_by(wrapper)
            followed = self._follow(wrapper)
            followed.last_pass = self._passes
            followed.passes_since = 0
        self.updated(averaged)
        self._averaged |= averaged
        for wrapper in self._ranks().wrappers():
            missed = self._averaged_by(wrapper).intersection(reached) - averaged
            if missed:
                self._follow(wrapper).passes_since += 1
                is_alone = data_parallel.runs_alone(wrapper)
                for index in missed:
                    self._missed[index] = _MISSED[is_alone, index in self._averaged]

    def updated(self, indices: Collection[int]) -> None:
        """Note that an update has used the gradients of some parameters."""
        self._averaged.difference_update(indices)
        for index in indices:
            self._missed.pop(index, None)

    def replicas(self, indices: Sequence[int]) -> list[Replicas]:
        """Return which parameters of an update other ranks hold as well."""
        replicas = []
        ranks = self._ranks()
        unwrapped = list(indices)
        # If several wrappers have a parameter, the wrapper that averaged it last counts.
        for wrapper in sorted(
            ranks.wrappers(), key=lambda known: self._follow(known).last_pass, reverse=True
        ):
            ignored = self._indices_of(data_parallel.ids_ignored_by(wrapper))
            wrapped = ranks.inside(wrapper) - ignored
            own = [index for index in unwrapped if index in wrapped]
            unwrapped = [index for index in unwrapped if index not in wrapped]
            if own and len(_dist.members(wrapper.process_group)) > 1:
                replicas.append(self._of_wrapper(wrapper, own))
        by_ranks = defaultdict(list)
        for index, param in zip(unwrapped, self._params(unwrapped), strict=True):
            if param is not None:
                by_ranks[_dist.holders(param)].append(index)
        for holders, own in by_ranks.items():
            if len(holders) > 1:
                key = f"by-hand/{self._hash(holders, own)}"
                replicas.append(Replicas(key, own, holders, (0, self._passes)))
        return replicas

    def _follow(self, wrapper: Any) -> _Followed:
        return self._followed.setdefault(wrapper, _Followed())

    def _of_wrapper(self, wrapper: Any, indices: Sequence[int]) -> Replicas:
        ranks = tuple(_dist.members(wrapper.process_group))
        followed = self._follow(wrapper)
        if followed.number < 0:
            followed.number = self._met[ranks]
            self._met[ranks] += 1
        missed = {index: why for index, why in self._missed.items() if index in indices}
        missed |= dict.fromkeys(set(indices) - self._averaged_by(wrapper), "unknown")
        runs_alone = not {"alone", "alone at last"}.isdisjoint(missed.values())
        if runs_alone or not data_parallel.averages_plainly(wrapper):
            followed.is_promised = False
        return Replicas(
            f"{followed.number}/{self._hash(ranks, indices)}",
            indices,
            ranks,
            (data_parallel.passes(wrapper), followed.passes_since),
            promised=followed.is_promised,
            missed=missed,
        )

    def _averaged_by(self, wrapper: Any) -> set[int]:
        return self._indices_of(data_parallel.ids_averaged_by(wrapper))

    def _indices_of(self, ids: Collection[int]) -> set[int]:
        return {index for index, param in enumerate(self._params(None)) if id(param) in ids}

    def _hash(self, ranks: tuple[int, ...], indices: Sequence[int]) -> int:
        """Return a number that ranks have in common if they have these parameters in common."""
        key = (ranks, tuple(indices))
        if key not in self._hashes:
            names = [self._names[index] for index in indices]
            shapes = [tuple(getattr(param, "shape", ())) for param in self._params(indices)]
            self._hashes[key] = zlib.crc32(repr((ranks, names, shapes)).encode())
        return self._hashes[key]
