"""The `DistributedDataParallel` wrappers of this process, and which of them average the next backward pass.

A wrapper averages in the backward pass after its own forward pass outside of `no_sync`. Ranks wait for each other in
no other pass. Only the reducer knows the pass that it awaits: trainers set it up themselves.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsurgeon.common import _live
from gradsurgeon.common._patching import Patch
from gradsurgeon.tensors import _dist, _torch

# Maps each wrapper to the ids of the parameters that it averages, taken when it was first seen.
_averages = weakref.WeakKeyDictionary[Any, frozenset[int]]()
# Maps each wrapper to how many passes it averaged while it was watched, alike on all of its ranks.
_passes = weakref.WeakKeyDictionary[Any, int]()
# The wrappers that average in the next pass that reaches one of their parameters.
_awaiting = weakref.WeakSet[Any]()


def watch() -> Callable[[], object]:
    forget()
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return forget
    return Patch(distributed.Reducer, "prepare_for_backward", _prepared).undo


def forget() -> None:
    """Treat no wrapper as awaiting a pass: some may have run unwatched since."""
    _awaiting.clear()


def _prepared(original: Callable[..., Any], reducer: object, *args: Any, **named: Any) -> Any:
    returned = original(reducer, *args, **named)
    reducers = [wrapper.reducer for wrapper in list(_averages)]
    if reducer not in reducers:
        _note(_live.instances(DistributedDataParallel))
    for wrapper in list(_averages):
        if wrapper.reducer is reducer:
            _awaiting.add(wrapper)
    return returned


_torch.compile_within_caller(_prepared)


def averages_plainly(wrapper: Any) -> bool:
    """Tell whether a wrapper averages over all of its ranks: not by a communication hook, and not under `Join`."""
    # There are no public names.
    return not (wrapper._comm_hooks or wrapper._join_config.enable)  # noqa: SLF001


def runs_alone(wrapper: Any) -> bool:
    """Tell whether a wrapper is under `no_sync`, or was at its last forward pass."""
    return not (wrapper.require_forward_param_sync and wrapper.require_backward_grad_sync)


def passes(wrapper: Any) -> int:
    return _passes.get(wrapper, 0)


def ids_averaged_by(wrapper: Any) -> frozenset[int]:
    return _averages[wrapper]


def ids_ignored_by(wrapper: Any) -> set[int]:
    """Return the ids of the parameters that the script told a wrapper to ignore."""
    ignored = wrapper.parameters_to_ignore
    if not ignored:  # nearly always
        return set()
    named = wrapper.module.named_parameters(remove_duplicate=False)
    return {id(param) for name, param in named if name in ignored}


def ids_of(params: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(map(id, params))


def find(params: Iterable[Tensor]) -> None:
    """Search all live objects for wrappers of some parameters that the script used before the watch, or never."""
    if _dist.world() == 1:
        return
    wanted = ids_of(params)
    for wrapper in _live.instances(DistributedDataParallel):
        if not wanted.isdisjoint(ids_of(wrapper.parameters())):
            _note([wrapper])


def _note(wrappers: Iterable[Any]) -> None:
    for wrapper in wrappers:
        if wrapper not in _averages:
            # A reducer never averages a parameter that is frozen now, even if the script unfreezes it later.
            ids = [id(param) for param in averaged_by(wrapper) if param.requires_grad]
            _averages[wrapper] = frozenset(ids)


def known() -> list[Any]:
    return list(_averages)


def is_any_awaiting() -> bool:
    return len(_awaiting) > 0


def averaged(wrapper: Any, leaves: Collection[int]) -> frozenset[int]:
    """Return the ids of the parameters that a wrapper averages in a pass that begins now and reaches some leaves."""
    if wrapper not in _awaiting or _averages[wrapper].isdisjoint(leaves):
        return frozenset()
    return _averages[wrapper]


def ended(reaches: Callable[[frozenset[int]], bool], *, failed: bool = False) -> list[Any]:
    """Return the wrappers that averaged in a pass that is over; other ranks may have finished a ``failed`` one."""
    if not _awaiting:
        return []
    # A wrapper can get its gradients in several passes, and averages in the last of them.
    averaged = []
    for wrapper in list(_awaiting):
        is_over = failed
        with suppress(RuntimeError):  # it still awaits gradients
            wrapper.reducer._check_reducer_finalized()  # noqa: SLF001 # there is no public name
            is_over = True
        if is_over and reaches(_averages[wrapper]):
            averaged.append(wrapper)
            _awaiting.discard(wrapper)
            _passes[wrapper] = passes(wrapper) + 1
    return averaged


def averaged_by(wrapper: Any) -> list[Tensor]:
    # There are no public names. The reducer averages the second list in one go, early or late.
    return [*wrapper._module_parameters, *wrapper._delay_all_reduce_params]  # noqa: SLF001


@contextmanager
def extra_pass(wrappers: Sequence[Any]) -> Iterator[None]:
    """Run backward passes that give no parameter a gradient, hidden from the wrappers."""
    # With a static graph the very first pass sets up the reduction. A first pass that reaches no parameter
    # would leave the reduction without a set-up for good.
    name = "_static_graph_delay_allreduce_enqueued"
    waiting = [wrapper for wrapper in wrappers if getattr(wrapper, name, None) is False]
    for wrapper in waiting:
        setattr(wrapper, name, True)
    try:
        yield
    finally:
        for wrapper in waiting:
            setattr(wrapper, name, False)
