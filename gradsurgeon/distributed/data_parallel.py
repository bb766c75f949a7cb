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
    """What is known of the reducer of a wrapper.

    Attributes:
        params: the ids of the parameters that it averages: those that it had when it was first seen.
        reached: where it awaits a pass, the ids of the parameters that passes have reached since.
    """

    params: frozenset[int]
    reached: set[int] | None = None


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
        reduction.reached = None


def _prepared(original: Callable[..., Any], reducer: object, *args: Any, **named: Any) -> Any:
    returned = original(reducer, *args, **named)
    if reducer not in [wrapper.reducer for wrapper in list(_reductions)]:
        _note(_live.instances(DistributedDataParallel))
    for wrapper, reduction in list(_reductions.items()):
        if wrapper.reducer is reducer:
            reduction.reached = set()
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
    return any(reduction.reached is not None for reduction in list(_reductions.values()))


def averaged(wrapper: Any, leaves: Collection[int]) -> frozenset[int]:
    """Return the ids of the parameters that a wrapper averages in a pass that begins now: none where it does not.

    Args:
        wrapper: one that is known.
        leaves: the ids of what the pass reaches.
    """
    reduction = _reductions[wrapper]
    awaits = reduction.reached is not None and not reduction.params.isdisjoint(leaves)
    return reduction.params if awaits else frozenset()


def begun(leaves: Collection[int]) -> None:
    """Take notice of a backward pass.

    Args:
        leaves: the ids of the parameters that it reaches.
    """
    for wrapper, reduction in list(_reductions.items()):
        if reduction.reached is None or not averaged(wrapper, leaves):
            continue
        reduction.reached.update(leaves)
        # Otherwise it waits for those that are missing.
        at_once = wrapper.find_unused_parameters or wrapper.static_graph
        frozen = {id(p) for p in _dist.averaged_by(wrapper) if not p.requires_grad}
        if at_once or reduction.params <= reduction.reached | frozen:
            reduction.reached = None
