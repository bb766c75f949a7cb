"""The `DistributedDataParallel` wrappers of this process, and which of them average in the next backward pass.

A wrapper averages in the backward pass that follows a forward pass of its own outside of `no_sync`: not in one of
the model that it wraps, and not in a second one. In no other pass do ranks wait for each other, so that in no other
they may be made to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsurgeon import _dist, _torch


@dataclass(slots=True)
class _LastCall:
    averages: bool
    # The ids of the parameters that backward passes have reached since.
    reached: set[int] = field(default_factory=set)


_calls: weakref.WeakKeyDictionary[DistributedDataParallel, _LastCall] = weakref.WeakKeyDictionary()


def called(
    original: Callable[..., Any], wrapper: DistributedDataParallel, *args: Any, **kwargs: Any
) -> Any:
    """Take notice of a forward pass; to be called around that of all wrappers."""
    output = original(wrapper, *args, **kwargs)
    _calls[wrapper] = _LastCall(torch.is_grad_enabled() and _dist.reduces(wrapper))
    return output


_torch.compile_within_caller(called)


def find(params: Iterable[Tensor]) -> None:
    """Look for wrappers of some parameters that were called before anybody took notice, or never."""
    for wrapper in _dist.data_parallel(params):
        _calls.setdefault(wrapper, _LastCall(averages=False))


def known() -> list[Any]:
    """Return the wrappers that were called or looked for, in no order that ranks share."""
    return list(_calls)


def averages(wrapper: Any) -> bool:
    """Tell whether a wrapper averages the gradients of a backward pass that begins now."""
    return _calls[wrapper].averages


def is_any_to_average() -> bool:
    return any(call.averages for call in list(_calls.values()))


def begun(leaves: Collection[int]) -> None:
    """Take notice of a backward pass.

    Args:
        leaves: the ids of the parameters that it reaches.
    """
    for wrapper, call in list(_calls.items()):
        params = {id(param) for param in wrapper.parameters() if param.requires_grad}
        if not call.averages or params.isdisjoint(leaves):
            continue
        call.reached.update(leaves)
        # Otherwise it waits for those that are missing.
        at_once = wrapper.find_unused_parameters or wrapper.static_graph
        call.averages = not (at_once or params <= call.reached)
