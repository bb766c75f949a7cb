"""Tells whether a script has written to weights and inputs between a failed step and its replay. Nothing waits for a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.readable import readable
from gradsurgeon.tensors.sampling import sample

Kind = tuple[torch.device, torch.dtype]
# Elements of each tensor that are compared. The version of a tensor says nothing of fused kernels and of `.data`.
_SAMPLE = 64


class Witness:
    """Tensors that a replay reads, by name, as they are now. It keeps none of them alive."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Identity and version of each, and the samples of each device and dtype: names, sizes, elements.
        self._known: dict[str, tuple[int, int]] = {}
        by_kind: dict[Kind, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            held = readable(tensor)
            if held is not None and held.layout is torch.strided:
                self._known[name] = (id(tensor), _torch.writes(tensor))
                kind = tensor.device, tensor.dtype
                by_kind.setdefault(kind, {})[name] = _sample(held)
        self._samples = []
        for parts in by_kind.values():
            sizes = list(map(len, parts.values()))
            self._samples.append(([*parts], sizes, torch.cat([*parts.values()])))

    def written(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors that were replaced or written to since, or are gone. Waits for the device."""
        now = Witness(tensors)
        before = self._bytes()
        after = now._bytes()  # of this class
        written = []
        for name, known in self._known.items():
            is_same = known == now._known.get(name)  # of this class
            if not is_same or not torch.equal(before[name], after[name]):
                written.append(name)
        return written

    def _bytes(self) -> dict[str, Tensor]:
        """Return the sample of each tensor on the host: bits are compared, because NaN does not equal NaN."""
        by_name: dict[str, Tensor] = {}
        for names, sizes, elements in self._samples:
            parts = [part.view(torch.uint8) for part in torch.split(elements.cpu(), sizes)]
            by_name.update(zip(names, parts, strict=True))
        return by_name


def _sample(tensor: Tensor) -> Tensor:
    """Return elements of a tensor at fixed places, flat; a view if its elements lie side by side."""
    count = min(_SAMPLE, tensor.numel())
    if not tensor.is_contiguous():
        return sample(tensor, _SAMPLE)
    stride = max(1, tensor.numel() // _SAMPLE)
    if stride > 1 and stride % 2 == 0:
        # An odd stride meets all columns of a matrix whose width is a power of two.
        stride -= 1
    return tensor.as_strided((count,), (stride,))
