"""Constants that a format rounds to zero: an epsilon of 1e-8 is none in float16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsurgeon.forensics.memory import place_of
from gradsurgeon.forensics.operations import elements, lines_here, tensors_of
from gradsurgeon.forensics.sources import Call

# What a script guards a division, a root or a logarithm with.
_GUARDS = ("add", "sub", "rsub", "clamp", "clamp_min", "maximum", "full", "full_like", "fill")
# Of zero they make zero.
_KEEP_ZERO = ("sqrt", "pow", "square", "abs", "clone", "_to_copy", "mul", "expand", "detach")


class LostConstants:
    """Knows which memory holds a zero where a constant was meant to stand."""

    def __init__(self) -> None:
        self._lost: dict[int, str] = {}

    def follow(self, call: Call, outputs: Iterable[Tensor]) -> None:
        """Note what a result owes to a constant that was lost. Its memory must be kept elsewhere."""
        told = self.among(call) if call.stem in _KEEP_ZERO else ""
        for output in outputs:
            lost = (told or _rounded(call, output)) if output.is_floating_point() else ""
            if lost and bool((elements(output) == 0).any()):
                self._lost[_key(output)] = lost
            else:
                self._lost.pop(_key(output), None)

    def among(self, call: Call) -> str:
        """Return the sentence on a constant that is lost in what an operation is given, or nothing."""
        if not self._lost:
            return ""
        given = (call.written.get(id(t), t) for t in tensors_of(call.args, call.kwargs))
        return next((text for t in given if (text := self._lost.get(_key(t), ""))), "")


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
            # It stands for a number.
            yield from (value.item(),) if value.is_floating_point() else ()


def _key(tensor: Tensor) -> int:
    return int(place_of(tensor)[0]._cdata)  # noqa: SLF001 # what two tensors share
