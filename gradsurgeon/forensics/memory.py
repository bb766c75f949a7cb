"""Which memory a replay has made, what it has written over, and where in it something is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.forensics.sources import Kind, Source


class Memory:
    """Knows memory by its storages, which it keeps, so that no other one gets the address of one."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Any, list[_Entry]]] = {}
        # What the replay has made, has not written to yet, and has written over.
        self._made: dict[int, Any] = {}
        self._unwritten: set[int] = set()
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def made(self, tensors: Iterable[Tensor], *, empty: bool = False) -> None:
        """Note memory that belongs to the replay; ``empty`` where nothing has been written yet."""
        for tensor in tensors:
            storage = place_of(tensor)[0]
            self._made[storage._cdata] = storage  # noqa: SLF001 # what two tensors share
            if empty:
                self._unwritten.add(storage._cdata)  # noqa: SLF001 # as above

    def is_unwritten(self, tensor: Tensor) -> bool:
        return place_of(tensor)[0]._cdata in self._unwritten  # noqa: SLF001 # as above

    def written(self, tensors: Iterable[Tensor]) -> None:
        self._unwritten.difference_update(place_of(tensor)[0]._cdata for tensor in tensors)  # noqa: SLF001 # as above

    def is_made(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in memory that the replay has made: others belong to the script."""
        return place_of(tensor)[0]._cdata in self._made  # noqa: SLF001 # as above

    def remember(self, tensor: Tensor, sources: Mapping[Kind, Iterable[Source]]) -> None:
        """Note by kind what has made a tensor not finite, instead of what was known of its memory."""
        storage, first, end = place_of(tensor)
        self.forget(tensor)
        known = self._sources.setdefault(storage._cdata, (storage, []))[1]  # noqa: SLF001 # what two tensors share
        for kind, made_by in sources.items():
            known += [_Entry(first, end, kind, source) for source in dict.fromkeys(made_by)]

    def forget(self, tensor: Tensor) -> None:
        """Forget what was not finite where an operation has written something else."""
        storage, first, end = place_of(tensor)
        known = self._sources.get(storage._cdata)  # noqa: SLF001 # as above
        if known is not None and tensor.is_contiguous():
            known[1][:] = [e for e in known[1] if not (first <= e.first and e.end <= end)]

    def known(self, tensor: Tensor, kind: Kind) -> list[Source]:
        """Return the sources of one kind of non-finite elements, else all that are known for the tensor."""
        storage, first, end = place_of(tensor)
        known = self._sources.get(storage._cdata, (None, []))[1]  # noqa: SLF001 # as above
        there = [e for e in known if e.first < end and first < e.end]
        return [e.source for e in there if e.kind == kind] or [e.source for e in there]

    def protect(self, tensor: Tensor) -> None:
        """Copy what an operation is about to write into, unless the replay itself has made it."""
        storage = place_of(tensor)[0]
        if storage._cdata not in self._made and storage._cdata not in self._saved:  # noqa: SLF001 # as above
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._saved[storage._cdata] = whole, whole.clone()  # noqa: SLF001 # as above

    def restore(self) -> None:
        """Put back what the replay has written over that it had not made itself."""
        with torch.no_grad():
            for whole, before in self._saved.values():
                whole.copy_(before)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where in a storage something is not finite, as element numbers, and what made it so."""

    first: int
    end: int
    kind: Kind
    source: Source


def place_of(tensor: Tensor) -> tuple[Any, int, int]:
    """Return the storage of a tensor, and between which of its bytes it lies."""
    part = _dist.local(tensor.detach())
    if part.layout == torch.sparse_coo:
        part = part._values()  # noqa: SLF001 # no copy
    elif part.layout != torch.strided:
        part = part.values()
    size = part.element_size()
    first = int(part.storage_offset()) * size
    reach = sum((int(n) - 1) * int(by) for n, by in zip(part.shape, part.stride(), strict=True))
    return part.untyped_storage(), first, first + (reach + 1) * size if part.numel() else first
