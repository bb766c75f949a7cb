"""A device made of Python: numbers of the CPU behind another device type, which gives it a thread of autograd.

Torch runs the hooks of such a device in a thread of the device, as it does with those of CUDA, and every
operation on its tensors passes through here, where it can be watched. It stays registered until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("toy")
DEVICE = torch.device("toy:0")
aten = torch.ops.aten


class Operation(NamedTuple):
    """One operation that torch has sent to the device, or between it and the host.

    Attributes:
        func: the overload.
        args: as they were given, with the tensors of the device.
        kwargs: the same.
        out: what came of it.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


# Are told of each operation, in the thread that has asked for it.
watchers: list[Callable[[Operation], None]] = []


class Toy(torch.Tensor):
    """A tensor on the device; its numbers are those of ``raw``."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls: type[Toy], raw: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 # as torch documents it
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    def tolist(self) -> Any:
        """Return the numbers, by a copy to the host."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the numbers, on the CPU."""
        del types
        given = dict(kwargs or {})
        if func is aten.copy_.default and not isinstance(args[0], Toy):
            args[0].copy_(args[1].raw)
            return _told(func, args, given, args[0])
        kwargs = {key: value for key, value in given.items() if key != "pin_memory"}
        if func is aten.mm.dtype_out:
            # Only CUDA multiplies half precision so.
            out = kwargs["out"].raw.copy_(args[0].raw.float() @ args[1].raw.float())
        else:
            bare = {key: _mapped(_bare, one) for key, one in kwargs.items()}
            out = func(*_mapped(_bare, args), **bare)
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cpu":
            return _told(func, args, given, out)
        known = {
            id(one.raw): one for one in leaves((args, *kwargs.values())) if isinstance(one, Toy)
        }

        def dressed(one: Any) -> Any:
            if not isinstance(one, torch.Tensor) or isinstance(one, Toy):
                return one
            return known[id(one)] if id(one) in known else Toy(one)

        return _told(func, args, given, _mapped(dressed, out))


def _bare(one: Any) -> Any:
    if isinstance(one, Toy):
        return one.raw
    if isinstance(one, torch.device) and one.type == "toy":
        return torch.device("cpu")
    return one


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is in lists and tuples, at any depth."""
    # Torch has the same for anything at all, which takes most of the time of an operation here.
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, one) for one in value])
    return change(value)


def _told(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    for watch in watchers:
        watch(Operation(func, args, kwargs, out))
    return out


class Factories(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types there
    """Makes tensors on the device, which tensors of the CPU alone would not reach."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, on the device where it names the device."""
        del types
        given = dict(kwargs or {})
        device = given.get("device")
        if device is None or torch.device(device).type != "toy":
            return func(*args, **given)
        kwargs = {key: value for key, value in given.items() if key != "pin_memory"}
        kwargs["device"] = torch.device("cpu")
        made = func(*_mapped(_bare, args), **kwargs)
        moved = any(isinstance(one, torch.Tensor) for one in args)
        return _told(func, args, given, Toy(made.clone() if moved else made))


def move(module: nn.Module) -> None:
    """Put the parameters of a module on the device, in place; ``Module.to`` cannot."""
    for part in module.modules():
        for key, param in list(part._parameters.items()):  # noqa: SLF001 # new ones in their place
            if param is not None:
                part._parameters[key] = nn.Parameter(Toy(param.detach().clone()))  # noqa: SLF001
