"""Counting what a device is asked to do, by the operations that torch sends to the one made of Python.

An operation is one call of a kernel of torch: on CUDA one launch, and more where the kernel needs several passes
or the tensors of a list do not fit into the arguments of one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.toy_device import Operation, Toy, aten, leaves, watchers

# Hand numbers to Python by themselves; all else comes to the host by a copy.
_READS = (aten._local_scalar_dense.default, aten.nonzero.default)  # noqa: SLF001 # torch's own names
# Take memory and leave it as it is.
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# A view that torch does not call one, since autograd knows nothing of it.
_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh"})
# Write without reading what was there.
_OVERWRITING = frozenset({"copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_"})
# Take a list of tensors, beside those whose names tell.
_OVER_LISTS = frozenset({"cat", "stack"})


@dataclass(slots=True)
class DeviceCounts:
    """What a device was asked to do.

    Attributes:
        operations: that compute, copy or fill on the device.
        list_operations: those of them that take a list of tensors, such as all ``_foreach_`` functions.
        bytes_read: by them, of the device's memory.
        bytes_written: by them.
        allocations: tensors that were made with memory of their own.
        host_reads: numbers or copies that the host has waited for.
        copies_to_host: on their way without anybody waiting.
        copies_from_host: waited for or not.
        names: how often each operation was called.
    """

    operations: int = 0
    list_operations: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    allocations: int = 0
    host_reads: int = 0
    copies_to_host: int = 0
    copies_from_host: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, int]:
        """Return the numbers, without the names of the operations."""
        return {key: value for key, value in asdict(self).items() if key != "names"}

    def add(self, operation: Operation) -> None:
        """Count one operation."""
        func, args, kwargs, out = operation
        name: str = func._schema.name.removeprefix("aten::")  # noqa: SLF001 # it has no public one
        target = args[0] if name == "copy_" else out
        if func in _READS:
            self.host_reads += 1
        elif isinstance(target, torch.Tensor) and not isinstance(target, Toy):
            self._count_copy_to_host(args, kwargs)
        elif name in ("copy_", "_to_copy") and not isinstance(args[name == "copy_"], Toy):
            self.copies_from_host += 1
        elif not (func.is_view or name in _VIEWS):
            self._count_work(name, operation)

    def _count_copy_to_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        without_waiting = kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True)
        if without_waiting:
            self.copies_to_host += 1
        else:
            self.host_reads += 1

    def _count_work(self, name: str, operation: Operation) -> None:
        given = _on_device((operation.args, *operation.kwargs.values()))
        before = set(map(id, given))
        made = [one for one in _on_device(operation.out) if id(one) not in before]
        changed = _on_device(list(_written(operation)))
        self.allocations += len(made)
        if name in _EMPTY or not (made or changed):
            return
        self.operations += 1
        self.list_operations += name in _OVER_LISTS or name.startswith(
            ("_foreach_", "_fused_", "_amp_foreach_")
        )
        self.names[name] += 1
        unread = set(map(id, changed)) if name in _OVERWRITING else set()
        self.bytes_read += sum(_size(one) for one in given if id(one) not in unread)
        self.bytes_written += sum(map(_size, (*made, *changed)))


def _on_device(value: Any) -> list[Toy]:
    return [one for one in leaves(value) if isinstance(one, Toy)]


def _written(operation: Operation) -> Iterator[Any]:
    """Yield the arguments that an operation writes to."""
    for number, argument in enumerate(operation.func._schema.arguments):  # noqa: SLF001 # as above
        if argument.alias_info is not None and argument.alias_info.is_write:
            if number < len(operation.args):
                yield operation.args[number]
            else:
                yield operation.kwargs.get(argument.name)


def _size(tensor: torch.Tensor) -> int:
    """Return how many bytes of memory a tensor covers: an expanded one has fewer than elements."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(side for side, stride in sides if stride) * tensor.element_size()


@contextmanager
def counting() -> Iterator[DeviceCounts]:
    """Count what the device made of Python is asked to do from here on, in all threads."""
    counts = DeviceCounts()
    watchers.append(counts.add)
    try:
        yield counts
    finally:
        watchers.remove(counts.add)
