"""Which memory a replay made or wrote over, where in it numbers are non-finite, and where constants got lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsurgeon import _dist
from gradsurgeon.forensics.operations import Kind, elements, lines_here, tensors_of
from gradsurgeon.forensics.sources import Call, Source

# Operations with which scripts guard a division, a root or a logarithm.
_GUARDS = ("add", "sub", "rsub", "clamp", "clamp_min", "maximum", "full", "full_like", "fill")
# Operations that make zero of zero.
_KEEP_ZERO = ("sqrt", "pow", "square", "abs", "clone", "_to_copy", "mul", "expand", "detach")


class Memory:
    """Knows memory by its storages. It keeps them alive, so no new storage gets a known address."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Any, list[_Entry]]] = {}
        # Storages that the replay has made, has not written to yet, and has written over.
        self._made: dict[int, Any] = {}
        self._unwritten: set[int] = set()
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def made(self, tensors: Iterable[Tensor], *, empty: bool = False) -> None:
        """Note memory that belongs to the replay; ``empty`` if nothing was written to it yet."""
        for tensor in tensors:
            self._made[_storage(tensor)] = place_of(tensor)[0]
            if empty:
                self._unwritten.add(_storage(tensor))

    def is_unwritten(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._unwritten

    def written(self, tensors: Iterable[Tensor]) -> None:
        self._unwritten.difference_update(map(_storage, tensors))

    def is_made(self, tensor: Tensor) -> bool:
        """Tell whether the replay made the memory of a tensor: other memory belongs to the script."""
        return _storage(tensor) in self._made

    def remember(self, tensor: Tensor, sources: Mapping[Kind, Iterable[Source]]) -> None:
        """Note by kind the sources of the non-finite numbers of a tensor; forget earlier ones."""
        storage, first, end = place_of(tensor)
        self.forget(tensor)
        known = self._sources.setdefault(_storage(tensor), (storage, []))[1]
        for kind, made_by in sources.items():
            known += [_Entry(first, end, kind, source) for source in dict.fromkeys(made_by)]

    def forget(self, tensor: Tensor) -> None:
        """Forget the sources for memory that an operation has written over."""
        known = self._sources.get(_storage(tensor))
        if known is not None and tensor.is_contiguous():
            _, first, end = place_of(tensor)
            known[1][:] = [e for e in known[1] if not (first <= e.first and e.end <= end)]

    def known(self, tensor: Tensor, kind: Kind) -> list[Source]:
        """Return the sources of one kind of non-finite elements, else all known sources of the tensor."""
        _, first, end = place_of(tensor)
        known = self._sources.get(_storage(tensor), (None, []))[1]
        there = [e for e in known if e.first < end and first < e.end]
        return [e.source for e in there if e.kind == kind] or [e.source for e in there]

    def protect(self, tensor: Tensor) -> None:
        """Copy the memory that an operation is about to write to, unless the replay made it."""
        place = _storage(tensor)
        if place not in self._made and place not in self._saved:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(place_of(tensor)[0])
            self._saved[place] = whole, whole.clone()

    def restore(self) -> None:
        """Put back all memory that the replay has written over and has not made."""
        with torch.no_grad():
            for whole, before in self._saved.values():
                whole.copy_(before)


class _Entry(NamedTuple):
    """The bytes of a storage between which numbers are non-finite, and their source."""

    first: int
    end: int
    kind: Kind
    source: Source


class LostConstants:
    """Knows the memory that holds a zero instead of a constant: an epsilon of 1e-8 is 0 in float16."""

    def __init__(self) -> None:
        self._lost: dict[int, str] = {}

    def follow(self, call: Call, outputs: Iterable[Tensor]) -> None:
        """Note which results hold a lost constant. Their memory must be kept alive elsewhere."""
        told = self.among(call) if call.stem in _KEEP_ZERO else ""
        for output in outputs:
            lost = (told or _rounded(call, output)) if output.is_floating_point() else ""
            if lost and bool((elements(output) == 0).any()):
                self._lost[_storage(output)] = lost
            else:
                self._lost.pop(_storage(output), None)

    def among(self, call: Call) -> str:
        """Return the sentence on a lost constant among the inputs of an operation, or an empty text."""
        if not self._lost:
            return ""
        given = (call.written.get(id(t), t) for t in tensors_of(call.args, call.kwargs))
        return next((text for t in given if (text := self._lost.get(_storage(t), ""))), "")


def _rounded(call: Call, output: Tensor) -> str:
    if call.stem not in _GUARDS:
        return ""
    limits = torch.finfo(output.dtype)
    smallest = limits.smallest_normal * limits.eps
    for number in _numbers(call):
        if 0 < abs(number) <= smallest / 2:
            dtype = str(output.dtype).removeprefix("torch.")
            lines = lines_here()
            where = f" at {lines[-1]}" if lines else ""
            return (
                f"{dtype} rounds the constant {number:g} to 0, as the smallest number that it holds is "
                f"{smallest:.1e}: {call.name}{where}"
            )
    return ""


def _numbers(call: Call) -> Iterator[float]:
    for value in tree_leaves((call.args, call.kwargs)):
        if isinstance(value, float):
            yield value
        elif isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
            # The dispatcher passes some numbers as such tensors.
            yield from (value.item(),) if value.is_floating_point() else ()


def _storage(tensor: Tensor) -> int:
    return int(place_of(tensor)[0]._cdata)  # noqa: SLF001 # the same for tensors that share memory


def place_of(tensor: Tensor) -> tuple[Any, int, int]:
    """Return the storage of a tensor, and its first byte and end in it."""
    part = _dist.local(tensor.detach())
    if part.layout == torch.sparse_coo:
        part = part._values()  # noqa: SLF001 # no copy
    elif part.layout != torch.strided:
        part = part.values()
    size = part.element_size()
    first = int(part.storage_offset()) * size
    reach = sum((int(n) - 1) * int(by) for n, by in zip(part.shape, part.stride(), strict=True))
    return part.untyped_storage(), first, first + (reach + 1) * size if part.numel() else first
