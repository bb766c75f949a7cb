"""Sharded tensors and the ranks that share them, wrapped once with types.

A sharded parameter is a `DTensor`: every rank holds a part of it. Reductions of one give this rank's
number without a word, so that nothing else in the package reduces a `DTensor`: it works on `local`
parts and merges the results of the ranks.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, cast

import torch
from torch import Tensor

from gradsurgeon import _live

Op = Literal["sum", "max"]
Groups = tuple[Any, ...]


def rank() -> int:
    if is_used():
        return int(torch.distributed.get_rank())
    # torchrun sets it before there is a process group, or without one.
    variable = os.environ.get("RANK", "")
    return int(variable) if variable.isdecimal() else 0


def named(ranks: Sequence[int]) -> str:
    """Return ranks as a message names them: ``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def having(ranks: Sequence[int]) -> str:
    """Return ranks as the subject of a sentence: ``rank 1 has`` or ``ranks 0, 2 have``."""
    return f"{named(ranks)} {'have' if len(ranks) > 1 else 'has'}"


def world() -> int:
    return int(torch.distributed.get_world_size()) if is_used() else 1


def is_used() -> bool:
    distributed: Any = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())


_PLAIN = {Tensor, torch.nn.Parameter}


def is_sharded(tensor: Tensor) -> bool:
    if type(tensor) in _PLAIN:  # asked of every gradient in every step
        return False
    # Whoever has made one has imported this; importing it costs time that others need not pay.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def any_sharded(tensors: Sequence[Tensor]) -> bool:
    return not set(map(type, tensors)) <= _PLAIN and any(map(is_sharded, tensors))


def local(tensor: Tensor) -> Tensor:
    """Return the elements that this rank holds, sharing their memory; they may be none at all."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():  # without, it would be a view that takes part in a graph
        part: Tensor = sharded.to_local()
    return part


def parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `local` of each."""
    return list(map(local, tensors)) if any_sharded(tensors) else list(tensors)


def is_partial(tensor: Tensor) -> bool:
    """Tell whether a tensor still awaits the sum over ranks (sequence parallel layers leave such)."""
    return is_sharded(tensor) and any(kind.is_partial() for kind in cast("Any", tensor).placements)


def settled(tensor: Tensor) -> Tensor:
    """Return a tensor with pending sums carried out. A collective where there are any."""
    if not is_partial(tensor):
        return tensor
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 # there is a DTensor, so it is paid

    sharded: Any = tensor
    placements = [Replicate() if kind.is_partial() else kind for kind in sharded.placements]
    with torch.no_grad():
        complete: Tensor = sharded.redistribute(placements=placements)
    return complete


def whole(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor on every rank. A collective for a sharded one."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        full: Tensor = sharded.full_tensor()
    return full


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor laid out over the ranks as ``tensor`` is, with ``part`` as the local part."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 # as above

    sharded: Any = tensor
    return DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def spread(tensor: Tensor) -> Groups:
    """Return the process groups over which the elements of a tensor are divided."""
    if not is_sharded(tensor):
        return ()
    sharded: Any = tensor
    kinds = enumerate(sharded.placements)
    return tuple(sharded.device_mesh.get_group(place) for place, kind in kinds if kind.is_shard())


_sharing: weakref.WeakKeyDictionary[Any, dict[Any, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def sharing(tensor: Tensor) -> tuple[int, ...]:
    """Return the ranks that together hold each element of a tensor once, ascending; nothing if this one holds all."""
    if not is_sharded(tensor):
        return ()
    sharded: Any = tensor
    known = _sharing.setdefault(sharded.device_mesh, {})
    if (
        sharded.placements not in known
    ):  # indexing a mesh takes longer than measuring a small tensor
        known[sharded.placements] = _ranks_sharing(sharded.device_mesh, sharded.placements)
    return known[sharded.placements]


def _ranks_sharing(mesh: Any, placements: Any) -> tuple[int, ...]:
    kinds = zip(mesh.get_coordinate(), placements, strict=True)
    # Along the other dimensions all ranks hold the same.
    index = tuple(slice(None) if kind.is_shard() else own for own, kind in kinds)
    ranks = sorted(mesh.mesh[index].flatten().tolist())
    return tuple(ranks) if len(ranks) > 1 else ()


def mesh_groups(tensor: Tensor) -> Groups:
    return tuple(cast("Any", tensor).device_mesh.get_all_groups()) if is_sharded(tensor) else ()


def reduce(values: Tensor, groups: Groups, op: Op = "sum") -> Tensor:
    """Return the sum or the maximum of ``values`` over groups of ranks. One collective per group.

    A group serves the devices of its backends and no others: NCCL cannot reduce a tensor on the host. The
    result comes back to the device of ``values``.
    """
    reduced = values.clone()
    kind = torch.distributed.ReduceOp.SUM if op == "sum" else torch.distributed.ReduceOp.MAX
    for group in groups:
        reduced = reduced.to(_reducible_on(group, reduced.device))
        torch.distributed.all_reduce(reduced, op=kind, group=group)
    return reduced.to(values.device)


def gather(values: Tensor, groups: Groups) -> Tensor:
    """Return ``values`` of all ranks of some groups. Shape ``[ranks, *values.shape]``. One collective per group."""
    gathered = values[None]
    for group in groups:
        own = gathered.to(_reducible_on(group, gathered.device)).contiguous()
        parts = [torch.empty_like(own) for _ in members(group)]
        torch.distributed.all_gather(parts, own, group=group)
        gathered = torch.cat(parts)
    return gathered.to(values.device)


def over_ranks(grads: Sequence[Tensor], parts: Tensor, merge: Callable[[Tensor], Tensor]) -> Tensor:
    """Return one number per gradient, made of what all ranks measured of their parts. A collective.

    All ranks must call it with the same gradients in the same order.

    Args:
        grads: the gradients; a plain one has one part, that of this rank.
        parts: shape ``[len(grads), k]``.
        merge: maps numbers of shape ``[ranks, n, k]`` to shape ``[n]``.
    """
    places_of: dict[Groups, list[int]] = {}
    for place, grad in enumerate(grads):
        places_of.setdefault(spread(grad), []).append(place)
    merged = parts.new_empty(len(grads))
    for groups, places in places_of.items():
        index = torch.tensor(places, device=parts.device)
        merged[index] = merge(gather(parts[index], groups))
    return merged


def _reducible_on(group: Any, wanted: torch.device) -> torch.device:
    """Return a device whose tensors a group can reduce: the one that is wanted, where it can."""
    # There is no public word for it. Empty means that the backend has yet to be made, for any device.
    types = [device.type for device in group._device_types]  # noqa: SLF001 # as said
    if not types or wanted.type in types:
        return wanted
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def settle(device: torch.device) -> None:
    """Wait until an accelerator has done, and a group has reduced, what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def members(group: Any) -> list[int]:
    return sorted(torch.distributed.get_process_group_ranks(group))


def timeout(group: Any) -> timedelta:
    """Return how long the collectives of a group wait for a rank."""
    device = torch.device(_reducible_on(group, torch.device("cpu")))
    try:
        # There is no public word for it.
        found: timedelta = group._get_backend(device).options._timeout  # noqa: SLF001 # as said
    except (AttributeError, RuntimeError):  # a backend of somebody else's
        return timedelta(minutes=10)
    return found


def store() -> Any:
    """Return the key-value store of the job: that of its default group."""
    # There is no public word for it.
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 # as said


def attempt() -> str:
    """Return what tells this attempt of a job from others: an agent that starts the ranks again keeps its store."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(["gradsurgeon", *(os.environ.get(name, "") for name in names)])


def own_store(prefix: str) -> Any:
    """Return the store of the job with a connection and keys of one's own: a request that waits holds up no other."""
    distributed: Any = torch.distributed
    return distributed.PrefixStore(f"{prefix}/", store().clone())


def server(port: int | None, limit: timedelta) -> Any:
    """Return a key-value store of this host: a server of this process, or that of another one on a port."""
    distributed: Any = torch.distributed
    return distributed.TCPStore(
        "127.0.0.1", port or 0, None, port is None, limit, wait_for_workers=False
    )


def data_parallel(params: Iterable[Tensor]) -> list[Any]:
    """Return the `DistributedDataParallel` wrappers that reduce gradients of some parameters.

    They are looked for among all live objects: a wrapper may have come after the session, and nothing
    on a parameter tells of it.
    """
    if world() == 1 or "torch.nn.parallel.distributed" not in sys.modules:
        return []
    wanted = {id(param) for param in params}
    return [
        wrapper
        for wrapper in _live.instances(torch.nn.parallel.DistributedDataParallel)
        if any(id(param) in wanted for param in wrapper.parameters())
    ]


def is_joining(wrapper: Any) -> bool:
    """Tell whether a wrapper runs under `Join`, where ranks may take different numbers of steps."""
    return bool(wrapper._join_config.enable)  # noqa: SLF001 # there is no public word for it


def reduces(wrapper: Any) -> bool:
    """Tell whether a wrapper reduces the gradients of its next backward pass, as without `no_sync`."""
    return bool(wrapper.require_backward_grad_sync)


def is_reduced(wrapper: Any) -> bool:
    """Tell whether a wrapper waits for none of the gradients of a backward pass that has begun."""
    try:
        wrapper.reducer._check_reducer_finalized()  # noqa: SLF001 # there is no public word for it
    except RuntimeError:
        return False
    return True


def averaged_by(wrapper: Any) -> list[Tensor]:
    """Return the parameters whose gradients a wrapper averages; it can be told to leave some alone."""
    # There is no public word for them. Those of the second list are reduced together, early or late.
    return [*wrapper._module_parameters, *wrapper._delay_all_reduce_params]  # noqa: SLF001


@contextmanager
def extra_pass(wrappers: Sequence[Any]) -> Iterator[None]:
    """Let backward passes run that give no parameter a gradient, without wrappers taking them for their own."""
    # With a static graph the first pass of all, whichever it is, sets up the reduction, and one that reaches no
    # parameter would leave it undone for good.
    name = "_static_graph_delay_allreduce_enqueued"
    waiting = [wrapper for wrapper in wrappers if getattr(wrapper, name, None) is False]
    for wrapper in waiting:
        setattr(wrapper, name, True)
    try:
        yield
    finally:
        for wrapper in waiting:
            setattr(wrapper, name, False)


def is_flattened(param: Tensor) -> bool:
    return bool(getattr(param, "_fsdp_flattened", False))


def is_divided(param: Tensor | None) -> bool:
    """Tell whether ranks have parts of a parameter each, so that autograd works on other tensors."""
    return param is not None and (is_sharded(param) or is_flattened(param))
