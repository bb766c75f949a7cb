"""The `DistributedDataParallel` wrappers of this process, and which of them average the next backward pass.

A wrapper averages in the backward pass that follows a forward pass of its own outside of `no_sync`: not in one of
the model that it wraps, and not in a second one. In no other pass do ranks wait for each other, so that in no other
they may be made to. Its reducer is told to await that pass, and nothing else says so: trainers tell it by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsurgeon import _dist, _live, _torch
from gradsurgeon._patching import Patch

# Of those that await a pass the ids of the parameters that passes have reached since; ``None`` of others.
_awaiting: weakref.WeakKeyDictionary[DistributedDataParallel, set[int] | None] = (
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
    _awaiting.update(dict.fromkeys(list(_awaiting)))


def _prepared(original: Callable[..., Any], reducer: object, *args: Any, **named: Any) -> Any:
    returned = original(reducer, *args, **named)
    if reducer not in [wrapper.reducer for wrapper in list(_awaiting)]:
        for wrapper in _live.instances(DistributedDataParallel):
            _awaiting.setdefault(wrapper, None)
    for wrapper in list(_awaiting):
        if wrapper.reducer is reducer:
            _awaiting[wrapper] = set()
    return returned


_torch.compile_within_caller(_prepared)


def find(params: Iterable[Tensor]) -> None:
    """Look for wrappers of some parameters that were used before anybody took notice, or never."""
    for wrapper in _dist.data_parallel(params):
        _awaiting.setdefault(wrapper, None)


def known() -> list[Any]:
    """Return the wrappers that were used or looked for, in no order that ranks share."""
    return list(_awaiting)


def is_any_awaiting() -> bool:
    return any(reached is not None for reached in list(_awaiting.values()))


def averaged(wrapper: Any, leaves: Collection[int]) -> list[Tensor]:
    """Return the parameters that a wrapper averages in a pass that begins now: none where it does not.

    Args:
        wrapper: one that is known.
        leaves: the ids of what the pass reaches.
    """
    params = _dist.averaged_by(wrapper) if _awaiting[wrapper] is not None else []
    return params if any(id(param) in leaves for param in params) else []


def begun(leaves: Collection[int]) -> None:
    """Take notice of a backward pass.

    Args:
        leaves: the ids of the parameters that it reaches.
    """
    for wrapper, reached in list(_awaiting.items()):
        params = averaged(wrapper, leaves)
        if reached is None or not params:
            continue
        reached.update(leaves)
        # Otherwise it waits for those that are missing.
        at_once = wrapper.find_unused_parameters or wrapper.static_graph
        if at_once or all(id(param) in reached for param in params if param.requires_grad):
            _awaiting[wrapper] = None
