"""A device made of Python: numbers of the CPU behind another device type, which gives it a thread of autograd.

Torch runs the hooks of such a device in a thread of the device, as it does with those of CUDA, and every
read by the host passes through here, where it is counted.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("toy")
DEVICE = torch.device("toy:0")
aten = torch.ops.aten
# How often the host has waited for a number, by operation, while `counting` is set.
reads: collections.Counter[str] = collections.Counter()
counting = [False]


class Toy(torch.Tensor):
    """A tensor on the device; its numbers are those of ``raw``."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls: type[Toy], raw: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
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
        _read("tolist")
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (aten._local_scalar_dense.default, aten.nonzero.default):
            _read(str(func))
        to_host = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
        if func is aten.copy_.default and not isinstance(args[0], Toy):
            if waits:
                _read("copy")
            args[0].copy_(args[1].raw)
            return args[0]
        if to_host and waits:
            _read("to")
        kwargs.pop("pin_memory", None)
        out = func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
        if to_host:
            return out
        known = {id(one.raw): one for one in tree_leaves((args, kwargs)) if isinstance(one, Toy)}

        def dressed(one: Any) -> Any:
            if not isinstance(one, torch.Tensor) or isinstance(one, Toy):
                return one
            return known[id(one)] if id(one) in known else Toy(one)

        return tree_map(dressed, out)


def _bare(one: Any) -> Any:
    if isinstance(one, Toy):
        return one.raw
    if isinstance(one, torch.device) and one.type == "toy":
        return torch.device("cpu")
    return one


def _read(what: str) -> None:
    if counting[0]:
        reads[what] += 1


class Factories(TorchDispatchMode):
    """Makes tensors on the device, which tensors of the CPU alone would not reach."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "toy":
            return func(*args, **kwargs)
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        made = func(*tree_map(_bare, args), **kwargs)
        moved = any(isinstance(one, torch.Tensor) for one in args)
        return Toy(made.clone() if moved else made)


class CudaCasts(TorchDispatchMode):
    """Rounds 0-dim float32 operands of half tensors first, as CUDA does and the CPU does not."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        narrow = (torch.float16, torch.bfloat16)
        if func in (aten.mul_.Tensor, aten.div_.Tensor, aten.mul.Tensor, aten.div.Tensor):
            left, right = args
            alone = isinstance(right, torch.Tensor) and right.ndim == 0
            if alone and left.ndim and left.dtype in narrow and right.dtype == torch.float32:
                args = (left, right.to(left.dtype))
        if func is aten._foreach_mul_.Tensor and args[0][0].dtype in narrow:
            args = (args[0], args[1].to(args[0][0].dtype))
        return func(*args, **(kwargs or {}))
