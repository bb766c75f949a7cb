"""The `DistributedDataParallel` wrappers of this process, and which of them average the next backward pass.

A wrapper averages in the backward pass that follows a forward pass of its own outside of `no_sync`: not in one of
the model that it wraps, and not in a second one. In no other pass do ranks wait for each other, so that in no other
they may be made to. Its reducer is told to await that pass, and nothing else says so: trainers tell it by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsurgeon import _dist, _live, _torch
from gradsurgeon._patching import Patch


@dataclass(slots=True)
class _Reduction:
    """The reducer of a wrapper, as far as it is known.

    Attributes:
        params: the ids of the parameters that it averages: those that it had when it was first seen.
        awaits: whether the next pass that reaches one of them averages them.
    """

    params: frozenset[int]
    awaits: bool = False


_reductions: weakref.WeakKeyDictionary[DistributedDataParallel, _Reduction] = (
    weakref.WeakKeyDictionary()
)


def watch() -> Callable[[], object]:
    """Take notice of wrappers as they are used; return what ends that."""
    forget()
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return forget
    return Patch(distributed.Reducer, "prepare_for_backward", _prepared).undo


def forget() -> None:
    """Take no wrapper for one that awaits a pass: nobody knows which have run since."""
    for reduction in list(_reductions.values()):
        reduction.awaits = False


def _prepared(original: Callable[..., Any], reducer: object, *args: Any, **named: Any) -> Any:
    returned = original(reducer, *args, **named)
    if reducer not in [wrapper.reducer for wrapper in list(_reductions)]:
        _note(_live.instances(DistributedDataParallel))
    for wrapper, reduction in list(_reductions.items()):
        if wrapper.reducer is reducer:
            reduction.awaits = True
    return returned


_torch.compile_within_caller(_prepared)


def find(params: Iterable[Tensor]) -> None:
    """Look for wrappers of some parameters that were used before anybody took notice, or never."""
    _note(_dist.data_parallel(params))


def _note(wrappers: Iterable[Any]) -> None:
    for wrapper in wrappers:
        if wrapper not in _reductions:
            # One that is frozen now is none of the reducer's, whatever becomes of it.
            params = [param for param in _dist.averaged_by(wrapper) if param.requires_grad]
            _reductions[wrapper] = _Reduction(frozenset(map(id, params)))


def known() -> list[Any]:
    """Return the wrappers that were used or looked for, in no order that ranks share."""
    return list(_reductions)


def is_any_awaiting() -> bool:
    return any(reduction.awaits for reduction in list(_reductions.values()))


def averaged(wrapper: Any, leaves: Collection[int]) -> frozenset[int]:
    """Return the ids of the parameters that a wrapper averages in a pass that begins now: none where it does not.

    Args:
        wrapper: one that is known.
        leaves: the ids of what the pass reaches.
    """
    reduction = _reductions[wrapper]
    awaits = reduction.awaits and not reduction.params.isdisjoint(leaves)
    return reduction.params if awaits else frozenset()


def ended(reaches: Callable[[frozenset[int]], bool], *, failed: bool = False) -> list[Any]:
    """Return the wrappers that have averaged in a pass that has ended; they await no other one.

    Args:
        reaches: tells whether the pass reaches any of some leaves, by their ids.
        failed: whether it has raised here. The others can have ended theirs.
    """
    over = []
    for wrapper, reduction in list(_reductions.items()):
        # A wrapper can get its gradients in several passes, and averages with the last of them.
        if not reduction.awaits or not (failed or _dist.is_reduced(wrapper)):
            continue
        if reaches(reduction.params):
            reduction.awaits = False
            over.append(wrapper)
    return over
