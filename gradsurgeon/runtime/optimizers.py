"""Questions to optimizers: which of them own some parameters, which tensors they hold, and whether a step is an update."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.common import _live
from gradsurgeon.runtime.running_steps import callers, params_of
from gradsurgeon.tensors import _torch

_NOT_MET = "the optimizer {kind} holds no parameter of the model, or hides the one that does: pass the optimizer that it wraps"


def versions(optimizer: Optimizer) -> list[int]:
    return [param._version for param in params_of(optimizer)]  # noqa: SLF001 # documented


def owning(params: Iterable[Tensor]) -> list[Optimizer]:
    wanted = set(map(id, params))

    def search() -> list[Optimizer]:
        candidates = []
        for optimizer in _live.instances(Optimizer):
            owned = wanted.intersection(map(id, params_of(optimizer)))
            if owned and _torch.hooked_optimizer(optimizer) is not None:
                candidates.append(optimizer)
        return candidates

    if not search():
        return []
    # Garbage that still waits for collection must not pass for the owner.
    gc.collect()
    return search()


def unmet(given: list[Optimizer], meet: Callable[[Optimizer], object | None]) -> Iterator[str]:
    """Meet the optimizers that the caller named; yield a text on each that owns nothing."""
    # Popped one by one: from here on the session holds the optimizers weakly.
    while given:
        optimizer = given.pop(0)
        if meet(optimizer) is None:
            yield _NOT_MET.format(kind=type(optimizer).__name__)


def first_with_gradient(optimizer: Optimizer) -> Tensor | None:
    for group in getattr(optimizer, "param_groups", ()):
        for param in group["params"]:
            if param.grad is not None:
                return param  # type: ignore[no-any-return] # a parameter
    return None


def only_makes_state(optimizer: Optimizer) -> bool:
    """Return whether `torch.distributed.checkpoint` steps a fresh optimizer to create its state."""
    module = "torch.distributed.checkpoint.state_dict"
    if optimizer.state or module not in sys.modules:
        return False
    for frame in callers(sys._getframe(1)):  # noqa: SLF001 # documented
        if frame.f_code.co_name == "_init_optim_state":
            return frame.f_globals.get("__name__") == module
    return False
