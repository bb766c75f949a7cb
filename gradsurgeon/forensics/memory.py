"""Which memory a replay made or wrote over, where in it numbers are non-finite, and where constants got lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsurgeon import _dist
from gradsurgeon.forensics.operations import Call, Kind, elements, lines_here
from gradsurgeon.forensics.sources import Source

# Operations with which scripts guard a division, a root or a logarithm.
_GUARDS = ("add", "sub", "rsub", "clamp", "clamp_min", "maximum", "full", "full_like", "fill")
# Operations that make zero of zero.
_KEEP_ZERO = ("sqrt", "pow", "square", "abs", "clone", "_to_copy", "mul", "expand", "detach")


class _Entry(NamedTuple):
    """The bytes of a storage between which numbers are non-finite, and their source."""

    first: int
    end: int
    kind: Kind
    source: Source


@dataclass(slots=True, eq=False)
class _Known:
    """One storage, kept alive so no new storage gets its address.

    Attributes:
        made: whether the replay made it: other memory belongs to the script.
        unwritten: whether nothing was written to it yet.
        entries: its non-finite parts.
        before: its bytes before the replay wrote over it, if the script owns it.
        lost: the sentence on a constant of which it holds a zero: an epsilon of 1e-8 is 0 in float16.
    """

    storage: Any
    made: bool = False
    unwritten: bool = False
    entries: list[_Entry] = field(default_factory=list)
    before: Tensor | None = None
    lost: str = ""


class Memory:
    """Knows memory by its storages."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def made(self, tensors: Iterable[Tensor], *, empty: bool = False) -> None:
        """Note memory that belongs to the replay; ``empty`` if nothing was written to it yet."""
        for tensor in tensors:
            known = self._of(tensor)
            known.made, known.unwritten = True, known.unwritten or empty

    def is_made(self, tensor: Tensor) -> bool:
        return self._of(tensor).made

    def is_unwritten(self, tensor: Tensor) -> bool:
        return self._of(tensor).unwritten

    def written(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._of(tensor).unwritten = False

    def remember(self, tensor: Tensor, sources: Mapping[Kind, Iterable[Source]]) -> None:
        """Note by kind the sources of the non-finite numbers of a tensor; forget earlier ones."""
        self.forget(tensor)
        _, first, end = place_of(tensor)
        self._of(tensor).entries += [
            _Entry(first, end, kind, source)
            for kind, made_by in sources.items()
            for source in dict.fromkeys(made_by)
        ]

    def forget(self, tensor: Tensor) -> None:
        """Forget the sources for memory that an operation has written over."""
        if (entries := self._of(tensor).entries) and tensor.is_contiguous():
            _, first, end = place_of(tensor)
            entries[:] = [e for e in entries if not (first <= e.first and e.end <= end)]

    def sources(self, tensor: Tensor, kind: Kind) -> list[Source]:
        """Return the sources of one kind of non-finite elements, else all known sources of the tensor."""
        _, first, end = place_of(tensor)
        there = [e for e in self._of(tensor).entries if e.first < end and first < e.end]
        return [e.source for e in there if e.kind == kind] or [e.source for e in there]

    def protect(self, tensor: Tensor) -> None:
        """Copy the memory that an operation is about to write to, unless the replay made it."""
        known = self._of(tensor)
        if not known.made and known.before is None:
            known.before = _bytes(known.storage).clone()

    def restore(self) -> None:
        """Put back all memory that the replay has written over and has not made."""
        with torch.no_grad():
            for known in self._known.values():
                if known.before is not None:
                    _bytes(known.storage).copy_(known.before)

    def follow_lost_constants(self, call: Call, outputs: Iterable[Tensor]) -> None:
        """Note which results hold a zero instead of a constant."""
        told = self.lost_constant(call) if call.stem in _KEEP_ZERO else ""
        for output in outputs:
            lost = (told or _rounded(call, output)) if output.is_floating_point() else ""
            self._of(output).lost = lost if lost and bool((elements(output) == 0).any()) else ""

    def lost_constant(self, call: Call) -> str:
        """Return the sentence on a lost constant among the inputs of an operation, or an empty text."""
        told = (self._of(call.passed(tensor)).lost for tensor in call.tensors)
        return next(filter(None, told), "")

    def _of(self, tensor: Tensor) -> _Known:
        storage = place_of(tensor)[0]
        # The same for tensors that share memory.
        return self._known.setdefault(int(storage._cdata), _Known(storage))  # noqa: SLF001 # no public name


def _bytes(storage: Any) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage)


def _rounded(call: Call, output: Tensor) -> str:
    if call.stem not in _GUARDS:
        return ""
    limits = torch.finfo(output.dtype)
    smallest = limits.smallest_normal * limits.eps
    number = next((n for n in _numbers(call) if 0 < abs(n) <= smallest / 2), None)
    if number is None:
        return ""
    dtype, lines = str(output.dtype).removeprefix("torch."), lines_here()
    return (
        f"{dtype} rounds the constant {number:g} to 0, as the smallest number that it holds is "
        f"{smallest:.1e}: {call.name}{f' at {lines[-1]}' if lines else ''}"
    )


def _numbers(call: Call) -> Iterator[float]:
    for value in tree_leaves((call.args, call.kwargs)):
        if isinstance(value, float):
            yield value
        # The dispatcher passes some numbers as tensors.
        elif isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
            yield from (value.item(),) if value.is_floating_point() else ()


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
