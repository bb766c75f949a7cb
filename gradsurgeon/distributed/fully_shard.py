"""Models that `torch.distributed.fsdp.fully_shard` has sharded, temporarily with whole parameters."""

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
    """The actions of `fully_shard` around the forward pass of a module, besides gathering parameters.

    Floating point arguments and outputs get a dtype, if any; ``moves`` tells whether arguments move to the parameters.
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
    new = {
        path: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for path, tensor in tensors_in(value)
    }
    return with_tensors(value, new) if new else value


def fits(model: nn.Module) -> bool:
    """Tell whether the device has room for whole parameters and gradients. Host memory is not checked."""
    params: dict[int, Any] = {
        id(param): param
        for module in _managed(model)
        for param in filter(_dist.is_sharded, module.parameters())
    }
    kinds = {param.device_mesh.device_type for param in params.values()}
    device: Any = torch.get_device_module(kinds.pop()) if kinds else None
    if not hasattr(device, "mem_get_info"):
        return True
    unused = device.memory_reserved() - device.memory_allocated()
    size = sum(param.numel() * param.element_size() for param in params.values())
    return bool(2 * size < device.mem_get_info()[0] + unused)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather whole parameters in the dtype of the mixed precision for a while; only casts remain. A collective."""
    with ExitStack() as stack:
        for module in _managed(model):
            before = list(map(id, module.parameters()))
            module.unshard()
            if before != list(map(id, module.parameters())):
                stack.callback(module.reshard)
        for module, cast in _casts(model):
            _quieten(module, cast, stack)
        yield


def _quieten(module: Any, cast: Cast, stack: ExitStack) -> None:
    """Make a module that `fully_shard` manages only cast: it neither gathers nor frees parameters."""
    state = vars(module._get_fsdp_state())  # noqa: SLF001 # there is no public name
    instead: list[tuple[dict[Any, Any], Any, Any]] = [
        # The replacement keeps the place of the hook: script hooks come before and after it.
        *((module._forward_pre_hooks, key, cast.before) for key in _own(module._forward_pre_hooks)),  # noqa: SLF001 # the same
        *((module._forward_hooks, key, cast.after) for key in _own(module._forward_hooks)),  # noqa: SLF001 # the same
        # The state calls these methods itself around methods registered as further forward methods.
        (state, "_pre_forward", cast.before),
        (state, "_post_forward", cast.after),
        # A forward pass of the script may call them.
        *((vars(module), name, _does_nothing) for name in ("unshard", "reshard")),
    ]
    for table, key, value in instead:
        # Modules of one group share a state, which must end up unchanged.
        undo = (table.__setitem__, key, table[key]) if key in table else (table.pop, key)
        stack.callback(*undo)
        table[key] = value


def _own(hooks: dict[Any, Any]) -> list[Any]:
    modules = {key: str(getattr(hook, "__module__", "")) for key, hook in hooks.items()}
    return [key for key, module in modules.items() if module.startswith(_OF_TORCH)]


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def casts(module: nn.Module) -> dict[str, Cast]:
    names = {id(inner): name for name, inner in reversed(named_modules(module).items())}
    found: dict[str, Cast] = {}
    for managed, cast in _casts(module):
        # A module that only wraps another module has no name of its own.
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
    return [module for module in model.modules() if "FSDPModule" in class_names(module)]


def _policy(module: Any) -> Any:
    return module._get_fsdp_state()._mp_policy  # noqa: SLF001 # there is no public name
