"""Sharded tensors and the ranks that share them, wrapped once with types.

A reduction of a `DTensor` silently gives this rank's number, so no other code in the package reduces one: the
functions here work on `local` parts and merge the results of the ranks.
"""

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor

from gradsurgeon.tensors._flat_part import FlatPart

Op = Literal["sum", "max"]
Groups = tuple[Any, ...]
Tensors = Sequence[Tensor]


def rank() -> int:
    if is_used():
        return int(torch.distributed.get_rank())
    # torchrun sets this variable before there is a process group, or without one.
    variable = os.environ.get("RANK", "")
    return int(variable) if variable.isdecimal() else 0


def named(ranks: Sequence[int]) -> str:
    noun = "rank"
    if len(ranks) > 1:
        noun = "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


def having(ranks: Sequence[int]) -> str:
    verb = "has" if len(ranks) == 1 else "have"
    return f"{named(ranks)} {verb}"


def world() -> int:
    if not is_used():
        return 1
    return int(torch.distributed.get_world_size())


def is_used() -> bool:
    return _IS_AVAILABLE and bool(_distributed.is_initialized())


_distributed: Any = torch.distributed  # a build without it has only one of its names
_IS_AVAILABLE = bool(_distributed.is_available())
PLAIN = {Tensor, torch.nn.Parameter}
# Seconds that a collective waits by default.
_PATIENCE = 600.0


def is_sharded(tensor: Tensor) -> bool:
    if type(tensor) in PLAIN:  # this runs for every gradient in every step
        return False
    if isinstance(tensor, FlatPart):
        return True
    # Code that has made a DTensor has imported this; other code need not pay for the import.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def any_sharded(tensors: Tensors) -> bool:
    # Loops over the tensors take six times as long. Nearly always the types alone give the answer.
    types = set(map(type, tensors))
    if types <= PLAIN:
        return False
    return any(map(is_sharded, tensors))


def local(tensor: Tensor) -> Tensor:
    """Return the elements that this rank holds, possibly none, sharing their memory."""
    if not is_sharded(tensor):
        return tensor
    if isinstance(tensor, FlatPart):
        return tensor.elements
    sharded: Any = tensor
    with torch.no_grad():  # otherwise the part would be a view in a graph
        part: Tensor = sharded.to_local()
    return part


def sizes(tensor: Tensor) -> list[int]:
    """Return the sizes of the dimensions along which `places` are counted."""
    if isinstance(tensor, FlatPart):
        return [tensor.whole]
    return list(tensor.shape)


def is_empty(tensor: Tensor) -> bool:
    """Tell whether this rank has no element of a flattened tensor."""
    return isinstance(tensor, FlatPart) and not len(tensor)


def places(tensor: Tensor) -> list[Tensor]:
    """Return, for each dimension of a sharded tensor, the indices that this rank holds; nothing for another tensor."""
    if not is_sharded(tensor):
        return []
    if isinstance(tensor, FlatPart):
        return [torch.arange(tensor.start, tensor.start + len(tensor))]
    sharded: Any = tensor
    mesh = sharded.device_mesh
    indices = []
    for dim, size in enumerate(tensor.shape):
        shape = [1] * tensor.dim()
        shape[dim] = size
        index = torch.arange(size).view(shape)
        for mesh_dim, placement in enumerate(sharded.placements):
            if placement.is_shard(dim):
                # No public name; it knows the order in which FSDP2 divides what tensor parallelism has divided.
                chunks, _ = placement._split_tensor(  # noqa: SLF001
                    index, mesh.size(mesh_dim), with_padding=False, contiguous=True
                )
                index = chunks[mesh.get_coordinate()[mesh_dim]]
        indices.append(index.flatten())
    return indices


def parts(tensors: Tensors) -> list[Tensor]:
    if not any_sharded(tensors):
        return list(tensors)
    return list(map(local, tensors))


def is_partial(tensor: Tensor) -> bool:
    """Tell whether a tensor still awaits a sum over ranks, as sequence parallel layers leave it."""
    if not is_sharded(tensor) or isinstance(tensor, FlatPart):
        return False
    sharded: Any = tensor
    return any(placement.is_partial() for placement in sharded.placements)


def settled(tensor: Tensor) -> Tensor:
    """Return a tensor with all pending sums carried out. A collective if there are any."""
    if not is_partial(tensor):
        return tensor
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 # a DTensor exists, so torch has imported it

    sharded: Any = tensor
    placements = [Replicate() if old.is_partial() else old for old in sharded.placements]
    with torch.no_grad():
        complete: Tensor = sharded.redistribute(placements=placements)
    return complete


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
    if isinstance(tensor, FlatPart):
        return (tensor.group,)
    sharded: Any = tensor
    groups = sharded.device_mesh.get_all_groups()
    placed = zip(groups, sharded.placements, strict=True)
    return tuple([group for group, placement in placed if placement.is_shard()])


_sharing = weakref.WeakKeyDictionary[Any, dict[Any, tuple[int, ...]]]()


def sharing(tensor: Tensor) -> tuple[int, ...]:
    """Return the ranks that together hold each element of a tensor once, ascending; nothing if this rank holds all."""
    if not is_sharded(tensor):
        return ()
    if isinstance(tensor, FlatPart):
        ranks = tuple(members(tensor.group))
        return ranks if len(ranks) > 1 else ()
    sharded: Any = tensor
    mesh = sharded.device_mesh
    placements = sharded.placements
    # Indexing a mesh takes longer than measuring a small tensor.
    known = _sharing.setdefault(mesh, {})
    if placements not in known:
        # Along the other dimensions all ranks hold the same elements.
        ranks = _ranks_along(mesh, [placement.is_shard() for placement in placements])
        if len(ranks) == 1:
            ranks = ()
        known[placements] = ranks
    return known[placements]


def _ranks_along(mesh: Any, is_free: Sequence[bool]) -> tuple[int, ...]:
    """Return the ranks that differ from this one along some dimensions of a mesh alone, ascending; itself included."""
    index = list(mesh.get_coordinate())
    for mesh_dim, varies in enumerate(is_free):
        if varies:
            index[mesh_dim] = slice(None)
    return tuple(sorted(mesh.mesh[tuple(index)].flatten().tolist()))


def holders(tensor: Tensor) -> tuple[int, ...]:
    """Return the ranks that hold the same elements of a tensor, as far as its kind shows, ascending."""
    if is_flattened(tensor):
        return (rank(),)
    if not is_sharded(tensor):
        return tuple(range(world()))
    sharded: Any = tensor
    is_copied = [not placement.is_shard() for placement in sharded.placements]
    return _ranks_along(sharded.device_mesh, is_copied)


def mesh_groups(tensor: Tensor) -> Groups:
    if not is_sharded(tensor):
        return ()
    sharded: Any = tensor
    return tuple(sharded.device_mesh.get_all_groups())


def reduce(values: Tensor, groups: Groups, op: Op = "sum") -> Tensor:
    """Return the sum or the maximum of ``values`` over groups of ranks. One collective per group.

    A group serves only the devices of its backends: NCCL cannot reduce a tensor on the host.
    """
    reduced = values.clone()
    kind = torch.distributed.ReduceOp.SUM
    if op == "max":
        kind = torch.distributed.ReduceOp.MAX
    for group in groups:
        reduced = reduced.to(_reducible_on(group, reduced.device))
        torch.distributed.all_reduce(reduced, op=kind, group=group)
    return reduced.to(values.device)


def gather(values: Tensor, groups: Groups) -> Tensor:
    gathered = values[None]
    for group in groups:
        own = gathered.to(_reducible_on(group, gathered.device)).contiguous()
        parts = [torch.empty_like(own) for _ in members(group)]
        torch.distributed.all_gather(parts, own, group=group)
        gathered = torch.cat(parts)
    return gathered.to(values.device)


def over_ranks(grads: Tensors, parts: Tensor, merge: Callable[[Tensor], Tensor]) -> Tensor:
    """Return one number per gradient, merged from the numbers of all ranks for their parts. A collective.

    All ranks must call it with the same gradients in the same order. ``parts`` has the shape ``[len(grads), k]``;
    ``merge`` maps numbers of shape ``[ranks, n, k]`` to shape ``[n]``.
    """
    places_of = defaultdict(list)
    for place, grad in enumerate(grads):
        groups = spread(grad)
        places_of[groups].append(place)
    merged = parts.new_empty(len(grads))
    for groups, places in places_of.items():
        index = torch.tensor(places, device=parts.device)
        merged[index] = merge(gather(parts[index], groups))
    return merged


def _reducible_on(group: Any, wanted: torch.device) -> torch.device:
    """Return a device whose tensors a group can reduce: the wanted device if possible."""
    # There is no public name. An empty list means that the group has yet to make a backend, for any device.
    types = [device.type for device in group._device_types]  # noqa: SLF001 # see above
    if not types or wanted.type in types:
        return wanted
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished all work that it was given, reductions included."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def members(group: Any) -> list[int]:
    return sorted(torch.distributed.get_process_group_ranks(group))


def patience(groups: Groups) -> float:
    """Return the shortest time, in seconds, that the collectives of some groups wait for a rank."""
    seconds = []
    for group in groups:
        device = torch.device(_reducible_on(group, torch.device("cpu")))
        with suppress(AttributeError, RuntimeError):  # a third-party backend
            # There is no public name.
            timeout = group._get_backend(device).options._timeout  # noqa: SLF001 # see above
            seconds.append(timeout.total_seconds())
    return min(seconds, default=_PATIENCE)


def is_flattened(param: Tensor) -> bool:
    return bool(getattr(param, "_fsdp_flattened", False))


def is_divided(param: Tensor | None) -> bool:
    """Tell whether each rank has a part of a parameter, so autograd works on other tensors."""
    if param is None:
        return False
    # ZeRO 3 numbers the parameters that it divides.
    return is_sharded(param) or is_flattened(param) or hasattr(param, "ds_id")
