"""What there is to know of optimizers: which own what, what they hold, what they cannot do."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gradsurgeon import _live, _torch

# Numbers that an optimizer keeps for itself, with where it keeps them.
Counters = list[tuple[dict[Any, Any], dict[Any, Any]]]
# Weights and state, to be put back.
Snapshot = tuple[list[tuple[Tensor, Tensor]], dict[Any, Any]]


def owning(params: Iterable[Tensor]) -> list[Optimizer]:
    wanted = {id(param) for param in params}

    def candidates() -> list[Optimizer]:
        return [
            found
            for found in _live.instances(Optimizer)
            if any(id(param) in wanted for param in params_of(found))
            and _torch.stepping(found) is not None
        ]

    found = candidates()
    if found:
        # One that only waits to be collected must not pass for the owner.
        del found
        gc.collect()
        found = candidates()
    return found


def params_of(optimizer: Optimizer) -> list[Tensor]:
    # Wrappers that skip the constructor of their base may have no groups of their own.
    groups = getattr(optimizer, "param_groups", ())
    return [param for group in groups for param in group["params"]]


def evaluates_before_moving(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer calls its closure once and moves its weights only then.

    Torch's own do, but for LBFGS. Of others it is not known.
    """
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, LBFGS
    )


def only_makes_state(optimizer: Optimizer) -> bool:
    """Tell whether a step that begins is no update, but made to learn which state an optimizer has.

    `torch.distributed.checkpoint` steps a fresh one on gradients of zero before it saves or loads.
    """
    frame: FrameType | None = None if optimizer.state else sys._getframe(1)  # noqa: SLF001 # documented
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            module: str = frame.f_globals.get("__name__", "")
            return module == "torch.distributed.checkpoint.state_dict"
        frame = frame.f_back
    return False


def snapshot(optimizer: Optimizer) -> Snapshot:
    params = params_of(optimizer)
    weights = [(param, param.detach().clone()) for param in params]
    # The keys of the state are the parameters themselves and must stay these.
    return weights, copy.deepcopy(dict(optimizer.state), {id(param): param for param in params})


def restore(optimizer: Optimizer, kept: Snapshot) -> None:
    weights, context = kept
    with torch.no_grad():
        for param, value in weights:
            param.copy_(value)
    optimizer.state.clear()
    optimizer.state.update(copy.deepcopy(context, {id(p): p for p in params_of(optimizer)}))


def counters(optimizer: Optimizer) -> Counters:
    """Copy what an optimizer keeps besides the state of its parameters.

    A step without gradients leaves weights and their state alone, but optimizers count steps, weights
    and learning rates per group, under names of their own in the state, or on themselves.
    """
    parts: list[dict[Any, Any]] = [*optimizer.param_groups, optimizer.state, vars(optimizer)]
    return [
        (
            part,
            {key: copy.deepcopy(value) for key, value in part.items() if _is_counter(key, value)},
        )
        for part in parts
    ]


def put_back(kept: Counters) -> None:
    """Put back what `counters` has copied, and take out the counters that have come since."""
    for part, values in kept:
        for key in [key for key, value in part.items() if _is_counter(key, value)]:
            if key not in values:
                del part[key]
        for key, value in values.items():
            now = part.get(key)
            if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
                # Captured graphs and schedulers hold the tensor itself.
                with torch.no_grad():
                    now.copy_(value)
            else:
                part[key] = value


def _is_counter(key: object, value: object) -> bool:
    """Tell a number that an optimizer keeps for itself from its parameters, their state and tables."""
    return not isinstance(key, Tensor) and isinstance(value, int | float | Tensor | None)
