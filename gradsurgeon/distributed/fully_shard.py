"""Models that `torch.distributed.fsdp.fully_shard` has divided over ranks, for a while with whole parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from gradsurgeon import _dist
from gradsurgeon.planning import named_modules
from gradsurgeon.planning.manifest import class_names
from gradsurgeon.tensors.structure import tensors_in, with_tensors

_OF_TORCH = "torch.distributed.fsdp"


class Cast(NamedTuple):
    """What `fully_shard` does around the forward pass of a module, beside bringing parameters together.

    Attributes:
        inputs: the dtype that floating point tensors among the arguments get, if any.
        outputs: the same for what comes out.
        moves: whether tensors among the arguments are brought to the device of the parameters.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype | None
    moves: bool

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        param = next(module.parameters(), None)
        device = param.device if self.moves and param is not None else None
        return _converted((args, kwargs), self.inputs, device)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        return _converted(output, self.outputs)


def _converted(value: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Return a structure with floating point tensors of a dtype, and all tensors on a device."""
    new = {
        path: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for path, tensor in tensors_in(value)
    }
    return with_tensors(value, new) if new else value


def fits(model: nn.Module) -> bool:
    """Tell whether the device has room for whole parameters and gradients. How much a host has is not asked."""
    sizes: dict[int, int] = {}
    device: Any = None
    for module in _managed(model):
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
    """Have whole parameters, and let `fully_shard` do nothing but cast, for a while. A collective.

    Whole parameters have the dtype of the mixed precision.
    """
    divided = []
    with ExitStack() as stack:
        try:
            for module in _managed(model):
                before = list(map(id, module.parameters()))
                module.unshard()
                if before != list(map(id, module.parameters())):
                    divided.append(module)
            for module, cast in _casts(model):
                _quieten(module, cast, stack)
            yield
        finally:
            stack.close()
            for module in divided:
                module.reshard()


def _quieten(module: Any, cast: Cast, stack: ExitStack) -> None:
    """Let a module that `fully_shard` manages cast, and neither gather parameters nor let go of them."""
    for table, instead in (
        (module._forward_pre_hooks, cast.before),  # noqa: SLF001 # no public word
        (module._forward_hooks, cast.after),  # noqa: SLF001 # the same
    ):
        for key, hook in list(table.items()):
            if str(getattr(hook, "__module__", "")).startswith(_OF_TORCH):
                # In its place: hooks of the script stand before it and after it.
                table[key] = instead
                stack.callback(table.__setitem__, key, hook)
    state = module._get_fsdp_state()  # noqa: SLF001 # the same
    # It calls them by itself around methods that are registered as further ways into the module.
    stack.enter_context(_attribute(state, "_pre_forward", cast.before))
    stack.enter_context(_attribute(state, "_post_forward", cast.after))
    # A forward pass may call them.
    for name in ("unshard", "reshard"):
        stack.enter_context(_attribute(module, name, _does_nothing))


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Hide a method by an attribute; modules of one group share their state, which is left as it was."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if had:
            own[name] = before
        else:
            del own[name]


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def casts(module: nn.Module) -> dict[str, Cast]:
    """Return what a model that is not divided has to do to compute the same, by canonical name of the module."""
    names = {id(inner): name for name, inner in reversed(named_modules(module).items())}
    found: dict[str, Cast] = {}
    for managed, cast in _casts(module):
        # One that only wraps another has no name of its own.
        known = (names[id(inner)] for inner in managed.modules() if id(inner) in names)
        found[next(known)] = cast
    return found


def _casts(model: nn.Module) -> Iterator[tuple[Any, Cast]]:
    managed = _managed(model)
    inner = {id(one) for module in managed for one in module.modules() if one is not module}
    for module in managed:
        policy = _policy(module)
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        yield module, Cast(inputs, policy.output_dtype, id(module) not in inner)


def _managed(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called for, outer ones first."""
    return [module for module in model.modules() if "FSDPModule" in class_names(module)]


def _policy(module: Any) -> Any:
    return module._get_fsdp_state()._mp_policy  # noqa: SLF001 # there is no public word for it
