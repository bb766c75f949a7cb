"""Models that `torch.distributed.fsdp.fully_shard` has divided over ranks, for a while with whole parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from gradsurgeon import _dist
from gradsurgeon.planning import ROOT, named_modules
from gradsurgeon.planning.manifest import class_names

_HOOKS = "torch.distributed.fsdp"


class Cast(NamedTuple):
    """What mixed precision of `fully_shard` does around the forward pass of a module.

    Attributes:
        inputs: the dtype that floating point tensors among the arguments get, if any.
        outputs: the same for what comes out.
        moves: whether tensors among the arguments are brought to the device of the parameters.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype | None
    moves: bool


def groups(model: nn.Module) -> _dist.Groups:
    """Return the groups of ranks that a model is divided over; none where `fully_shard` has not done that."""
    if not _managed(model):
        return ()
    of_params = (_dist.mesh_groups(param) for param in model.parameters())
    return tuple(dict.fromkeys(group for several in of_params for group in several))


def fits(model: nn.Module) -> bool:
    """Tell whether the device has room for whole parameters and gradients. How much a host has is not asked."""
    sizes: dict[int, int] = {}
    device: Any = None
    for module in _managed(model).values():
        dtype = _policy(module).param_dtype
        for param in filter(_dist.is_sharded, module.parameters()):
            # What the innermost module says, which comes last, counts.
            sizes[id(param)] = param.numel() * (dtype or param.dtype).itemsize
            mesh: Any = param
            device = torch.get_device_module(mesh.device_mesh.device_type)
    if not hasattr(device, "mem_get_info"):
        return True
    unused = device.memory_reserved() - device.memory_allocated()
    return bool(2 * sum(sizes.values()) < device.mem_get_info()[0] + unused)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Have whole parameters, and none of the hooks of `fully_shard`, for a while. A collective.

    Whole parameters have the dtype of the mixed precision. What the hooks do besides, `casts` tells.
    """
    divided, hooks = [], []
    try:
        for module in _managed(model).values():
            before = list(map(id, module.parameters()))
            module.unshard()
            if before != list(map(id, module.parameters())):
                divided.append(module)
        for module in model.modules():
            for table in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 # no public word
                of_torch = {
                    k: h
                    for k, h in table.items()
                    if str(getattr(h, "__module__", "")).startswith(_HOOKS)
                }
                hooks.append((table, of_torch))
                # In its place, so that all are in their order afterwards.
                table.update(dict.fromkeys(of_torch, _does_nothing))
        yield
    finally:
        for table, of_torch in hooks:
            table.update(of_torch)
        for module in divided:
            module.reshard()


def _does_nothing(*args: Any) -> None:
    del args


def casts(module: nn.Module) -> dict[str, Cast]:
    """Return what has to be done in place of the hooks of `fully_shard`, by name of the module."""
    found: dict[str, Cast] = {}
    outermost: list[str] = []
    for name, inner in _managed(module).items():
        policy = _policy(inner)
        moves = not any(o == ROOT or name.startswith(f"{o}.") for o in outermost)
        outermost += [name] if moves else []
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        found[name] = Cast(inputs, policy.output_dtype, moves)
    return found


def _managed(model: nn.Module) -> dict[str, Any]:
    """Return the modules that `fully_shard` was called for, by name; outer ones first."""
    return {n: m for n, m in named_modules(model).items() if "FSDPModule" in class_names(m)}


def _policy(module: Any) -> Any:
    return module._get_fsdp_state()._mp_policy  # noqa: SLF001 # there is no public word for it
